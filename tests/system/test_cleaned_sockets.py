"""A running service whose sockets were removed, as macOS cleans its temporary folder."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.hosts.served import Served, wait_until

pytestmark = pytest.mark.system

FAKE = ("--engine", "fake", "--fake-decode-rate", "200")


def endpoint(served: Served) -> Path:
    line = served.workers()[0].cmdline()
    return Path(line[line.index("--endpoint") + 1].removeprefix("ipc://"))


def remove(path: Path, whole: bool) -> None:
    shutil.rmtree(path.parent) if whole else path.unlink()


def kill_worker(served: Served, index: int) -> None:
    os.kill(served.get("/workers")[1]["workers"][index]["pid"], signal.SIGKILL)


def replaced(served: Served) -> bool:
    workers = served.get("/workers")[1]["workers"]
    return all(worker["status"] == "ready" and worker["epoch"] == 1 for worker in workers)


@pytest.mark.parametrize(
    ("mode", "whole"),
    [
        ((), False),
        pytest.param((), True, marks=pytest.mark.slow),
        (("--tp-size", "2", "--enable-dp-attention"), True),
    ],
    ids=["socket", "directory", "directory of a group"],
)
def test_workers_that_die_afterwards_are_replaced(mode: tuple[str, ...], whole: bool) -> None:
    with Served(*FAKE, "--dp-size", "2", *mode) as served:
        served.wait_until_ready()
        path = endpoint(served)
        remove(path, whole)
        status, _ = served.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert status == 200, "those that are connected go on"
        for index in (0,) if mode else (0, 1):
            kill_worker(served, index)
        wait_until(lambda: replaced(served), "both are replaced")
        assert served.get("/health")[0] == 200
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0
        assert not path.parent.exists()


def test_where_they_cannot_be_made_again_the_service_says_so_and_ends() -> None:
    with Served(*FAKE, "--max-restarts", "1") as served:
        served.wait_until_ready()
        path = endpoint(served)
        remove(path, whole=True)
        path.parent.touch()
        try:
            kill_worker(served, 0)
            assert served.exit_status() == 1
        finally:
            path.parent.unlink()
        reason = f"the socket directory {path.parent} is gone and cannot be made again: "
        assert [line for line in served.lines if "worker 0: lost" in line and reason in line]
        assert len([line for line in served.lines if line.startswith("mlx-dp: error: ")]) == 1
        assert "Traceback" not in served.output
