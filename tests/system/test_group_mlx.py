"""A group on a real model: two owners, one of which is killed or stopped while both stream."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.hosts.served import Served, wait_until
from tests.support.models.tiny_models import DENSE

pytestmark = [pytest.mark.system, pytest.mark.mlx]

RANKS = (0, 1)
TOKENS = 24
PATIENCE_S = 180.0
"""Ranks that wait spin, and share the machine with other work."""
FLAGS = ("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention", "--hang-timeout", "6")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DENSE["llama"].write(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    arguments = ("--model", str(model), "--served-model-name", "fake", *FLAGS)
    with Served(*arguments) as made:
        made.wait_until_ready(PATIENCE_S)
        yield made


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> dict[int, str]:
    """The undisturbed output of each owner."""
    return answers(served, lambda: None)


def answers(served: Served, disturb: Callable[[], None]) -> dict[int, str]:
    """Stream from both owners at once, and disturb them once both have begun."""
    begun = {rank: threading.Event() for rank in RANKS}
    texts: dict[int, list[str]] = {rank: [] for rank in RANKS}
    errors: list[Any] = []

    def read(rank: int) -> None:
        body = {
            "prompt": f"Chapter {rank + 1}. The old lighthouse",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "routed_dp_rank": rank,
        }
        try:
            for event in served.stream(body):
                if event == "[DONE]":
                    continue
                texts[rank].append(json.loads(event)["choices"][0]["text"])
                if len(texts[rank]) == TOKENS // 4:
                    begun[rank].set()
        except Exception as error:
            errors.append((rank, error))
        finally:
            begun[rank].set()

    threads = [threading.Thread(target=read, args=(rank,)) for rank in RANKS]
    for thread in threads:
        thread.start()
    for each in begun.values():
        assert each.wait(PATIENCE_S)
    disturb()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a stream never ended"
    assert errors == []
    return {rank: "".join(parts) for rank, parts in texts.items()}


def workers(served: Served) -> list[dict[str, Any]]:
    return served.get("/workers")[1]["workers"]


def all_ready(served: Served) -> None:
    wait_until(
        lambda: {each["status"] for each in workers(served)} == {"ready"},
        "all are ready",
        PATIENCE_S,
    )


def test_each_owner_holds_its_share_as_planned(served: Served, model: Path) -> None:
    loads = served.get("/v1/loads")[1]["loads"]
    assert [load["status"] for load in loads] == ["ready", "ready"]
    weights = [owner["weights_nbytes"] for owner in served.get("/server_info")[1]["owners"]]
    tensors = mx.load(str(model / "model.safetensors"))
    whole = sum(each.nbytes for each in tensors.values())
    divided = sum(each.nbytes for name, each in tensors.items() if ".mlp." in name)
    assert weights == [whole - divided // 2] * 2
    assert "were planned" not in served.output


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "it was stopped by a signal", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped"],
)
def test_no_client_notices_that_a_rank_is_gone(
    served: Served, undisturbed: dict[int, str], number: signal.Signals, cause: str
) -> None:
    all_ready(served)
    before = workers(served)

    def strike() -> None:
        os.kill(before[1]["pid"], number)

    assert answers(served, strike) == undisturbed
    all_ready(served)
    after = workers(served)
    assert all(now["epoch"] > was["epoch"] for was, now in zip(before, after, strict=True))
    # On a busy machine another loss may have come later, so that the last cause is that one's.
    lost = [line for line in served.lines if f"worker 1: lost, pid {before[1]['pid']}" in line]
    assert cause in lost[0]
