"""All workers on hosts that mlx.launch reaches over ssh: two loopback addresses of this machine."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.served import Served, alive, wait_until
from tests.support.hosts.ssh_hosts import FIRST, SECOND, SshHosts, session_of, why_not

pytestmark = pytest.mark.system

BODY = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "seed": 7, "temperature": 0}
GROUP = ("--dp-size", "2", "--enable-dp-attention", "--restart-delay", "0.05")
FAKE = ("--engine", "fake", "--fake-decode-rate", "100")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "ssh"
    folder.mkdir()
    with SshHosts(folder) as made:
        yield made


def host_file(folder: Path, *names: str) -> tuple[str, ...]:
    path = folder / "hosts.json"
    path.write_text(json.dumps([{"ssh": name, "ips": [name]} for name in names]))
    return ("--hostfile", str(path), "--dist-init-addr", "127.0.0.1:0")


@contextmanager
def group(hosts: SshHosts, folder: Path, *arguments: str) -> Iterator[Served]:
    launched = host_file(folder, FIRST, SECOND)
    with Served(*arguments, *GROUP, *launched, environment=hosts.environment) as served:
        # A model is measured on each host, and loaded there, on one busy machine.
        served.wait_until_ready(300.0)
        yield served


def workers(served: Served) -> list[dict]:
    return served.get("/workers")[1]["workers"]


def epochs(served: Served) -> set[int]:
    return {each["epoch"] for each in workers(served) if each["status"] == "ready"}


def text_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]", events[-2:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def goes_on_after_a_kill_and_a_cut(served: Served) -> None:
    undisturbed = text_of(list(served.stream(BODY)))
    hosts = [each["pid"] for each in workers(served)]
    events = []
    for event in served.stream({**BODY, "routed_dp_rank": 1}):
        events.append(event)
        if len(events) == 5:
            (rank,) = psutil.Process(hosts[1]).children()
            rank.kill()
    assert text_of(events) == undisturbed
    assert [each["pid"] for each in workers(served)] == hosts, "the hosts stay"
    before = max(epochs(served))
    events = []
    for event in served.stream({**BODY, "routed_dp_rank": 0}):
        events.append(event)
        if len(events) == 5:
            session_of(hosts[1]).kill()
    assert text_of(events) == undisturbed
    assert len(epochs(served)) == 1
    assert min(epochs(served)) > before
    assert {each["pid"] for each in workers(served)}.isdisjoint(hosts), "all were launched again"
    served.wait_for_line(f"rank 1 on {SECOND}: its ssh connection was lost")


@pytest.mark.slow
def test_a_group_goes_on_after_a_killed_rank_and_a_cut_connection(hosts, tmp_path) -> None:
    with group(hosts, tmp_path, *FAKE) as served:
        goes_on_after_a_kill_and_a_cut(served)
        assert "Traceback" not in served.output
        assert "\\x1b" not in served.output
        running = served.workers() + [psutil.Process(each["pid"]) for each in workers(served)]
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0
        wait_until(lambda: not any(map(alive, running)), "nothing is left")


@pytest.mark.mlx
@pytest.mark.slow
def test_a_group_of_a_model_goes_on_too(hosts, tmp_path) -> None:
    from tests.support.models.tiny_models import DENSE

    model = str(DENSE["llama"].write(tmp_path / "model"))
    with group(hosts, tmp_path, "--model", model, "--served-model-name", "fake") as served:
        goes_on_after_a_kill_and_a_cut(served)


def test_a_host_that_ssh_cannot_reach_ends_the_service_with_the_words_of_ssh(
    hosts, tmp_path
) -> None:
    launched = host_file(tmp_path, FIRST, "127.0.0.4")
    budget = ("--max-restarts", "1", "--restart-delay", "0.05")
    with Served(
        *FAKE, "--dp-size", "2", *budget, *launched, environment=hosts.environment
    ) as served:
        assert served.exit_status() == 1
        last = served.lines[-1]
        assert last.startswith("mlx-dp: error: ssh to 127.0.0.4 failed (")
        assert "Connection refused" in last
        assert "'ssh 127.0.0.4 true' must work" in last
        assert "--max-restarts 1" in last
        assert "Traceback" not in served.output


def test_a_worker_host_that_is_refused_is_not_launched_again(hosts, tmp_path) -> None:
    from mlx_dp.proto.wire.key_files import write_keys

    keys = tmp_path / "keys"
    write_keys(keys, ["worker"])
    (keys / "other.key").write_text((keys / "worker.key").read_text())
    launched = (*host_file(tmp_path, FIRST, SECOND), "--keys", str(keys))
    with Served(*FAKE, "--dp-size", "2", *launched, environment=hosts.environment) as served:
        assert served.exit_status() == 2
        assert "mlx-dp worker exited with status 2: --keys" in served.lines[-1]
        assert "must hold one worker's .key file" in served.lines[-1]
