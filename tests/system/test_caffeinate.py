"""The power assertion of real services, which take this system for macOS."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.hosts.served import Served, wait_until

pytestmark = pytest.mark.system

ON_MACOS = """
from mlx_dp.orchestrator.process.power_assertion import keep_awake
keep_awake.__wrapped__.__kwdefaults__["platform"] = "darwin"
from mlx_dp.orchestrator.cli.commands import main
main()
"""
SERVE = (sys.executable, "-c", ON_MACOS, "serve", "--engine", "fake", "--port", "0")
WORKER = (
    *(sys.executable, "-c", ON_MACOS, "worker"),
    *("--controller", "tcp://127.0.0.1:1", "--rank", "1"),
)


@pytest.fixture
def caffeinate(tmp_path: Path) -> Path:
    """The folder of a caffeinate that writes its pid and arguments to ``called`` beside it."""
    called = tmp_path / "called"
    program = tmp_path / "caffeinate"
    program.write_text(
        f'#!/bin/sh\necho $$ "$@" > {called}.tmp\nmv {called}.tmp {called}\nexec sleep 600\n'
    )
    program.chmod(0o755)
    return tmp_path


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("command", [SERVE, WORKER], ids=["serve", "worker"])
def test_it_begins_and_ends_with_the_process(caffeinate: Path, command: tuple[str, ...]) -> None:
    path = {"PATH": f"{caffeinate}:{os.environ['PATH']}"}
    with Served(command=command, environment=path) as served:
        called = caffeinate / "called"
        wait_until(called.exists, "caffeinate is started")
        pid, *arguments = called.read_text().split()
        assert arguments == ["-i", "-w", str(served.process.pid)]
        if command is SERVE:
            served.wait_until_ready()
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0
        assert gone(int(pid))
        assert "caffeinate" not in served.output


def test_without_caffeinate_the_service_starts_with_one_warning(tmp_path: Path) -> None:
    # On macOS itself the shell's PATH has one.
    with Served(command=SERVE, environment={"PATH": str(tmp_path)}) as served:
        served.wait_until_ready()
        (warning,) = [line for line in served.lines if "caffeinate" in line]
        assert warning.startswith("mlx-dp: warning: caffeinate cannot be started (")
    with Served("--no-caffeinate", command=SERVE, environment={"PATH": str(tmp_path)}) as served:
        served.wait_until_ready()
        assert "caffeinate" not in served.output
