"""The launcher's runs, with a launcher and an ssh of the test's own."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from mlx_dp.orchestrator.process.remote import mlx_launch as module
from mlx_dp.orchestrator.process.remote.host_file import Host
from mlx_dp.orchestrator.process.remote.mlx_launch import (
    LaunchEnd,
    LaunchOutput,
    LaunchPlan,
    LaunchWatch,
    MlxLaunch,
    without_escapes,
)

HOSTS = (Host(ssh="mac1"), Host(ssh="mac2"), Host(ssh="127.0.0.1"))
TRACE = """Exception in thread Thread-1 (_thread_fn):
Traceback (most recent call last):
  File "threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "launch.py", line 97, in terminate
    c = run(
        ^^^^
subprocess.CalledProcessError: Command 'ssh mac1' returned non-zero exit status 1.
worker: hello"""
RANKS = frozenset({0, 1})
HERE = (Host(ssh="127.0.0.1"), Host(ssh="127.0.0.1"))


def heard(*lines: str) -> LaunchOutput:
    output = LaunchOutput(HOSTS)
    for line in lines:
        output.feed(without_escapes(line))
    return output


def test_colours_and_moves_of_the_cursor_are_taken_out() -> None:
    line = "\x1b[33m[WARN] Node with rank 1 \x1b[1;31mexited\x1b[0m with code 255 \x1b[0m\r"
    assert without_escapes(line) == "[WARN] Node with rank 1 exited with code 255"
    assert without_escapes("\x1b]0;title\x07text") == "text"


def test_the_first_node_that_ended_is_the_cause() -> None:
    output = heard(
        "\x1b[33m[WARN] Node with rank 1 exited with code 255 \x1b[0m",
        "\x1b[33m[WARN] Node with rank 0 was killed \x1b[0m",
    )
    assert (output.ended, output.status, output.final) == (1, 255, False)
    assert output.cause("exited with status 0 (ok)") == (
        "rank 1 on mac2: its ssh connection was lost"
    )


def test_the_last_words_of_a_worker_host_are_part_of_the_cause() -> None:
    output = heard(
        "mlx-dp: error: this machine has no model directory /m: give its own",
        "[WARN] Node with rank 0 exited with code 2",
    )
    assert output.final
    assert output.cause("x") == (
        "rank 0 on mac1: mlx-dp worker exited with status 2: this machine has no model directory "
        "/m: give its own"
    )


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Node with rank 0 was killed", "rank 0 on mac1: mlx-dp worker was killed, and its last"),
        ("Node with rank 1 exited with code 5", "mlx-dp worker exited with status 5, and its"),
        ("Node with rank 2 exited with code 255", "on 127.0.0.1: mlx-dp worker exited with status"),
        ("Node with rank 9 exited with code 1", "rank 9 on an unknown host"),
    ],
)
def test_an_end_without_a_word_of_ours_may_be_mended_by_another_try(line, cause) -> None:
    output = heard(line)
    assert cause in output.cause("x")
    assert not output.final


def test_a_launcher_that_ends_by_itself_is_told_with_its_last_line() -> None:
    assert heard("", "usage: mlx.launch", "").cause("exited with status 2 (usage)") == (
        "mlx.launch exited with status 2 (usage): usage: mlx.launch"
    )
    assert heard().cause("killed by SIGKILL") == "mlx.launch killed by SIGKILL"


def test_the_launchers_own_tracebacks_are_not_shown() -> None:
    output = LaunchOutput(HOSTS)
    assert [line for line in TRACE.splitlines() if output.feed(line)] == ["worker: hello"]


def test_a_rank_that_had_joined_must_not_stay_away() -> None:
    watch = LaunchWatch(RANKS, patience_s=10.0)
    assert watch.update({0, 1}, 0.0) is None
    assert watch.update({0}, 1.0) is None
    assert watch.update({0}, 11.0) is None
    assert watch.update({0}, 11.1) == 1


def test_one_that_comes_back_in_time_is_counted_anew() -> None:
    watch = LaunchWatch(RANKS, patience_s=10.0)
    watch.update({0, 1}, 0.0)
    watch.update({0}, 1.0)
    watch.update({0, 1}, 9.0)
    assert watch.update({0}, 12.0) is None
    assert watch.update({0}, 22.0) is None


def test_one_that_never_came_has_its_own_words() -> None:
    watch = LaunchWatch(RANKS, patience_s=10.0)
    assert watch.update({0}, 0.0) is None
    assert watch.update({0}, 1000.0) is None


class Run:
    """One launch of a Python script in place of mlx.launch."""

    def __init__(self, folder: Path, script: str, *, max_restarts: int = 0) -> None:
        path = folder / "launcher.py"
        path.write_text(f"import time\nopen({str(folder / 'runs')!r}, 'a').write('x')\n{script}")
        self.folder = folder
        self.lines: list[str] = []
        self.present: set[int] = set()
        plan = LaunchPlan(
            command=[sys.executable, "-u", str(path)],
            hosts=HERE,
            max_restarts=max_restarts,
            restart_delay_s=0.001,
            patience_s=0.01,
        )
        self.launch = MlxLaunch(plan, self.lines.append, lambda: self.present)

    @property
    def count(self) -> int:
        return len((self.folder / "runs").read_text())

    def end(self) -> LaunchEnd | None:
        async def run() -> LaunchEnd | None:
            async with asyncio.timeout(120.0):
                return await self.launch.run()

        return asyncio.run(run())


def test_the_budget_is_spent_and_then_it_ends_with_the_cause(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    run = Run(tmp_path, "print('\\x1b[33mno such backend\\x1b[0m')", max_restarts=2)
    assert run.end() == LaunchEnd(
        "mlx.launch exited with status 0 (ok): no such backend (gave up after --max-restarts 2)"
    )
    assert run.count == 3
    assert run.lines == ["no such backend"] * 3
    assert caplog.text.count("the hosts are launched again in") == 2


def test_a_node_that_ended_ends_the_others_at_once(tmp_path) -> None:
    script = "print('[WARN] Node with rank 1 exited with code 1')\ntime.sleep(600)"
    end = Run(tmp_path, script).end()
    assert end is not None
    assert end.cause.startswith("rank 1 on 127.0.0.1: mlx-dp worker exited with status 1")


def test_a_refusal_is_not_tried_again_even_when_it_is_told_late(tmp_path) -> None:
    script = (
        "print('[WARN] Node with rank 0 exited with code 2')\n"
        "print('mlx-dp: error: --keys k holds none')\ntime.sleep(600)"
    )
    run = Run(tmp_path, script, max_restarts=5)
    assert run.end() == LaunchEnd(
        "rank 0 on 127.0.0.1: mlx-dp worker exited with status 2: --keys k holds none", final=True
    )
    assert run.count == 1


def test_a_host_that_is_lost_without_a_word_ends_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    run = Run(tmp_path, "time.sleep(600)")
    seen = iter([{0, 1}, {0, 1}])
    run.launch._present = lambda: next(seen, {0})
    end = run.end()
    assert end is not None
    assert end.cause.startswith("rank 1: 127.0.0.1 has not been heard for too long")


def test_a_host_that_ssh_cannot_reach_is_not_launched(tmp_path, monkeypatch) -> None:
    async def fault(hosts, python) -> str:
        assert list(hosts) == ["127.0.0.1"] * 2
        assert python == sys.executable
        return "ssh to mac2 failed"

    monkeypatch.setattr(module, "login_fault", fault)
    run = Run(tmp_path, "")
    assert run.end() == LaunchEnd("ssh to mac2 failed (gave up after --max-restarts 0)")
    assert not (tmp_path / "runs").exists()


def test_it_can_be_stopped_while_it_waits_for_ssh(tmp_path, monkeypatch) -> None:
    async def silence(hosts, python) -> str:
        run.launch.stop()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(module, "login_fault", silence)
    run = Run(tmp_path, "")
    assert run.end() is None


def test_a_launcher_that_is_not_there_is_the_cause(tmp_path) -> None:
    plan = LaunchPlan(command=[str(tmp_path / "none")], hosts=HERE, max_restarts=0)
    end = asyncio.run(MlxLaunch(plan, print, frozenset).run())
    assert end is not None
    assert end.cause.startswith("mlx.launch cannot be started: ")
