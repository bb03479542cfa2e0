"""All workers on the hosts of a host file, started by mlx.launch. All hosts are this machine."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.served import Served, alive, wait_until

pytestmark = [pytest.mark.system, pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    arguments = ("--engine", "fake", "--dp-size", "2", "--hostfile", str(hosts))
    with Served(*arguments, "--dist-init-addr", "127.0.0.1:0") as made:
        made.wait_until_ready()
        yield made


def ended(processes: list[psutil.Process]) -> bool:
    return not any(alive(process) for process in processes)


def states(served: Served) -> list[tuple[str, int]]:
    return [(each["status"], each["epoch"]) for each in served.get("/workers")[1]["workers"]]


def test_the_launcher_is_started_again_and_ends_with_the_service(served: Served) -> None:
    before = served.get("/workers")[1]["workers"]
    assert [each["remote"] for each in before] == [True, True]
    first = served.workers()
    (launcher,) = psutil.Process(served.process.pid).children()
    launcher.kill()
    wait_until(lambda: ended(first), "nothing of the first launch is left")
    wait_until(lambda: states(served) == [("ready", 1)] * 2, "both are back")
    second = served.workers()
    assert len(second) == 5, "a launcher, two hosts and two workers"
    served.signal(signal.SIGTERM)
    assert served.exit_status() == 0
    wait_until(lambda: ended(second), "nothing of the second launch is left")
