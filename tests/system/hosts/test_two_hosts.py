"""Workers on another host, whose cable is cut during a response."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_dp.proto.wire.key_files import write_keys
from tests.support.hosts.network_hosts import FAR, NEAR, FarHost, why_not
from tests.support.hosts.served import Served, wait_until

pytestmark = pytest.mark.system

WORKER = (sys.executable, "-m", "mlx_dp.orchestrator.cli.entry", "worker")
FAKE = ("--engine", "fake", "--fake-decode-rate", "100")
BODY = {"prompt": "hello", "max_tokens": 160, "ignore_eos": True, "seed": 7}


@pytest.fixture
def far() -> Iterator[FarHost]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with FarHost() as host:
        yield host


@pytest.fixture
def keys(tmp_path: Path) -> str:
    write_keys(tmp_path / "keys", ["worker"])
    return str(tmp_path / "keys")


def text_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]", events[-2:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def worker(served: Served, index: int) -> dict:
    return served.get("/workers")[1]["workers"][index]


def endpoint_of(served: Served) -> str:
    command = shlex.split(served.wait_for_line("--controller tcp://"))
    return command[command.index("--controller") + 1]


def test_a_cut_cable_moves_the_stream_and_the_far_worker_comes_back(far, keys) -> None:
    remote = ("--dp-size", "2", "--remote-workers", "1", "--dist-init-addr", f"{NEAR}:0")
    with Served(*FAKE, *remote, "--keys", keys) as served:
        there = ("--controller", endpoint_of(served), "--rank", "1", "--keys", keys)
        with Served(*there, command=far.command(*WORKER)) as host:
            served.wait_until_ready()
            assert worker(served, 1)["remote"]
            undisturbed = text_of(list(served.stream(BODY)))
            incarnation = worker(served, 1)["incarnation"]
            events = []
            for event in served.stream({**BODY, "data_parallel_rank": 1}):
                events.append(event)
                if len(events) == 20:
                    assert len(far.pids()) == 2, "a host and its worker"
                    far.cut()
            assert text_of(events) == undisturbed
            wait_until(lambda: far.pids() == [host.process.pid], "the worker there has ended")
            assert worker(served, 1)["status"] == "starting"
            assert text_of(list(served.stream(BODY))) == undisturbed
            far.mend()
            wait_until(lambda: worker(served, 1)["status"] == "ready", "it is back")
            assert worker(served, 1)["incarnation"] != incarnation
            pinned = {**BODY, "max_tokens": 20, "data_parallel_rank": 1}
            assert undisturbed.startswith(text_of(list(served.stream(pinned))))


@pytest.mark.slow
@pytest.mark.mlx
def test_a_group_over_the_cable_forms_again_and_its_answers_go_on(far, keys, tmp_path) -> None:
    from tests.support.models.tiny_models import DENSE

    model = str(DENSE["llama"].write(tmp_path / "model"))
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": ip, "ips": [ip]} for ip in (NEAR, FAR)]))
    group = ("--dp-size", "2", "--enable-dp-attention", "--hostfile", str(hosts), "--no-launch")
    serve = ("--model", model, "--served-model-name", "fake", *group)
    with Served(*serve, "--dist-init-addr", f"{NEAR}:0", "--keys", keys) as served:
        there = ("--controller", endpoint_of(served), "--keys", keys, "--rank")
        with (
            Served(*there, "0", command=WORKER),
            Served(*there, "1", command=far.command(*WORKER)) as host,
        ):
            # The group has its own time to form, once both ranks are up.
            served.wait_for_line("worker 1: started")
            served.wait_until_ready(300.0)
            body = {**BODY, "temperature": 0, "routed_dp_rank": 1}
            undisturbed = text_of(list(served.stream(body)))
            events = []
            for event in served.stream(body):
                events.append(event)
                if len(events) == 5:
                    far.cut()
                    wait_until(lambda: far.pids() == [host.process.pid], "the rank there has ended")
                    wait_until(lambda: worker(served, 1)["host"] is None, "it is missed")
                    assert worker(served, 0)["status"] != "ready"
                    far.mend()
            assert text_of(events) == undisturbed
            # A busy machine may have made it begin more than once.
            epochs = {worker(served, rank)["epoch"] for rank in (0, 1)}
            assert len(epochs) == 1
            assert 0 not in epochs
