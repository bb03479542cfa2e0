"""A request that cannot be sampled fails alone; an error of all requests ends the worker."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Down, Start, Submit
from mlx_dp.proto.messages.events import Failed, FailureKind, FinishReason, Up
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.grammar.compiler import GrammarCompiler
from mlx_dp.worker.sampling import sampler
from mlx_dp.worker.sampling.penalties import Penalties
from mlx_dp.worker.startup import run_worker
from tests.support.batches.grammar_answers import regex
from tests.support.batches.tiny_batches import prompt_of
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.worker.chosen_forms import ChosenForms
from tests.support.worker.scripted_channel import ScriptedChannel
from tests.support.worker.worker_starts import mlx_start, no_warm_up

pytestmark = pytest.mark.mlx

BAD_SEED = 666
BAD_TOKEN = 259
GREEDY = SamplingParams(temperature=0.0)
GOOD = {
    1: GREEDY,
    2: SamplingParams(temperature=0.9, seed=2, top_p=0.9, repetition_penalty=1.2),
    3: SamplingParams(temperature=0.7, seed=3, top_k=20, logprobs=2, logit_bias=((9, 3.0),)),
}
BAD = 9
FORMS = ChosenForms()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["llama"].write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[int, list[int]]:
    return answers(run(model, good_submits())[1])


class Channel(ScriptedChannel):
    """Lets requests, and the worker itself, end with an error."""

    def __init__(self, start: Start, script: list[tuple[int, Down]]) -> None:
        super().__init__(start, script, errors=True)

    @property
    def failed(self) -> Failed | None:
        return self.controller.failed

    def send(self, message: Up) -> None:
        self.controller.receive(message)


def submit(request_id: int, params: SamplingParams, **changes: Any) -> Submit:
    asked: dict[str, Any] = {
        "request_id": request_id,
        "epoch": 1,
        "prompt_ids": tuple(prompt_of(20, salt=request_id)),
        "output_ids": (),
        "max_tokens": 16,
        "params": params,
    }
    return Submit(**asked | changes)


def good_submits() -> list[tuple[int, Down]]:
    return [
        (5 * at, submit(request_id, params)) for at, (request_id, params) in enumerate(GOOD.items())
    ]


def run(model: Path, script: list[tuple[int, Down]]) -> tuple[ExitCode, Channel]:
    channel = Channel(mlx_start(model, requests=6), script)
    with FORMS.remembered("llama"), no_warm_up():
        return run_worker(channel), channel


def answers(channel: Channel) -> dict[int, list[int]]:
    for request_id in GOOD:
        finished = channel.received[request_id].finished
        assert finished is not None
        assert finished.reason is FinishReason.LENGTH
    return {request_id: channel.received[request_id].ids for request_id in GOOD}


def no_key(seed: int, position: int, key: Any = sampler.draw_key) -> tuple[int, int]:
    if seed == BAD_SEED:
        raise ValueError("no such key")
    return key(seed, position)


def no_mark(self: Penalties, ids: Any, mark: Any = Penalties._mark) -> Any:
    if BAD_TOKEN in ids:
        raise IndexError("no such mark")
    return mark(self, ids)


def no_grammar(*_: Any, **_named: Any) -> None:
    raise RuntimeError("no such grammar")


SEEDED = submit(BAD, SamplingParams(temperature=1.0, seed=BAD_SEED))


@pytest.mark.parametrize("turn", [0, 6, 30])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        pytest.param(SEEDED, "ValueError: no such key", id="seed"),
        pytest.param(
            submit(
                BAD,
                SamplingParams(temperature=0.0, repetition_penalty=1.1),
                prompt_ids=(5, BAD_TOKEN),
            ),
            "IndexError: no such mark",
            id="penalty",
        ),
        pytest.param(
            submit(BAD, SamplingParams(temperature=1.0, seed=BAD_SEED), max_tokens=1),
            "ValueError: no such key",
            id="one token",
        ),
    ],
)
def test_a_request_that_cannot_be_sampled_fails_alone(
    model: Path,
    undisturbed: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    bad: Submit,
    error: str,
    turn: int,
) -> None:
    monkeypatch.setattr(sampler, "draw_key", no_key)
    monkeypatch.setattr(Penalties, "_mark", no_mark)
    again = submit(BAD + 1, bad.params, prompt_ids=bad.prompt_ids)
    code, channel = run(model, [*good_submits(), (turn, bad), (turn + 3, again)])
    assert code is ExitCode.OK
    assert channel.failed is None
    for request_id in (BAD, BAD + 1):
        received = channel.received[request_id]
        assert received.ids == []
        assert received.finished is not None
        assert received.finished.reason is FinishReason.ERROR
        assert received.finished.message == f"the request cannot be sampled: {error}"
    assert answers(channel) == undisturbed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no memory"), FailureKind.INTERNAL),
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), FailureKind.INTERNAL),
        (RuntimeError("[ring] connection reset"), FailureKind.PEER_LOST),
    ],
)
def test_what_says_nothing_of_a_request_ends_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: FailureKind
) -> None:
    def broken(seed: int, position: int, key: Any = sampler.draw_key) -> tuple[int, int]:
        if seed == BAD_SEED:
            raise error
        return key(seed, position)

    monkeypatch.setattr(sampler, "draw_key", broken)
    code, channel = run(model, [*good_submits(), (3, SEEDED)])
    assert channel.failed is not None
    assert channel.failed.kind is kind
    assert str(error) in channel.failed.message
    assert code is ExitCode[kind.name]


def test_an_error_of_the_whole_batch_ends_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = sampler.Sampler.draw

    def broken(self: Any, logits: Any, positions: Any, masks: Any = None) -> Any:
        if len(positions) > 2:
            raise RuntimeError("the batch is broken")
        return draw(self, logits, positions, masks)

    monkeypatch.setattr(sampler.Sampler, "draw", broken)
    code, channel = run(model, good_submits())
    assert code is ExitCode.INTERNAL
    assert channel.failed is not None
    assert "the batch is broken" in channel.failed.message


def test_a_grammar_that_cannot_be_begun_fails_alone(
    model: Path, undisturbed: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarCompiler, "fault", lambda *_: None)
    monkeypatch.setattr(GrammarCompiler, "begin", no_grammar)
    guided = submit(BAD, GREEDY, grammar=regex("a+"), stop_token_ids=(2,))
    code, channel = run(model, [*good_submits(), (8, guided)])
    assert code is ExitCode.OK
    finished = channel.received[BAD].finished
    assert finished is not None
    assert finished.message == "the request cannot be sampled: RuntimeError: no such grammar"
    assert answers(channel) == undisturbed
