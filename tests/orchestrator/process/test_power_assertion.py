"""The power assertion, with a caffeinate that only records its arguments."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mlx_dp.orchestrator.process.power_assertion import keep_awake

pytestmark = pytest.mark.system

RUNS = 'echo $$ "$@" > "{}.tmp"; mv "{}.tmp" "{}"; exec sleep 600'


@pytest.fixture
def path_with(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    def install(script: str) -> dict[str, str]:
        program = tmp_path / "caffeinate"
        program.write_text(f"#!/bin/sh\n{script.replace('{}', str(tmp_path / 'called'))}\n")
        program.chmod(0o755)
        return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return install


def wait_for(path: Path) -> str:
    """The content of a file once it is there; another process makes it, and sends no event."""
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def test_it_is_held_for_as_long_as_the_service_runs(path_with, tmp_path: Path) -> None:
    told: list[str] = []
    with keep_awake(path_with(RUNS), told.append, platform="darwin"):
        pid, *arguments = wait_for(tmp_path / "called").split()
        assert arguments == ["-i", "-w", str(os.getpid())]
        assert os.getpgid(int(pid)) != os.getpgid(0), "Ctrl-C would end it before the drain"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert told == []


def test_it_is_released_where_the_service_fails(path_with, tmp_path: Path) -> None:
    held = keep_awake(path_with(RUNS), pytest.fail, platform="darwin")
    held.__enter__()
    pid = wait_for(tmp_path / "called").split()[0]
    error = RuntimeError("ours")
    assert not held.__exit__(RuntimeError, error, None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.parametrize(("platform", "wanted"), [("linux", True), ("darwin", False)])
def test_it_is_held_on_macos_alone_and_where_it_is_wanted(
    path_with, tmp_path: Path, platform: str, wanted: bool
) -> None:
    environment = path_with("touch {}")
    with keep_awake(environment, pytest.fail, wanted=wanted, platform=platform):
        pass
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("script", [None, "not a program"], ids=["missing", "not executable"])
def test_a_caffeinate_that_cannot_be_started_is_one_warning(
    tmp_path: Path, script: str | None
) -> None:
    if script is not None:
        (tmp_path / "caffeinate").write_text(script)
        (tmp_path / "caffeinate").chmod(0o755)
    told: list[str] = []
    with keep_awake({"PATH": str(tmp_path)}, told.append, platform="darwin"):
        assert len(told) == 1
    (warning,) = told
    assert warning.startswith("caffeinate cannot be started (")
    assert "--no-caffeinate" in warning


def test_one_that_ended_by_itself_is_told(path_with) -> None:
    told: list[str] = []
    before = psutil.Process().children()
    with keep_awake(path_with("exit 3"), told.append, platform="darwin"):
        (child,) = [each for each in psutil.Process().children() if each not in before]
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert told == ["caffeinate had ended with status 3: this machine may have slept"]
