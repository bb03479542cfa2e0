"""Worker processes: their start, their ends, and their leftovers."""

import asyncio
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from mlx_dp.orchestrator.process import exit_watch
from mlx_dp.orchestrator.process.launcher import ProcessLauncher, stack_dump_signal

pytestmark = pytest.mark.system

DEADLINE_S = 200.0
WAIT_FOR_PARENT = """
import os, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("up", flush=True)
os.read(int(options["--death-fd"]), 1)
"""


class Run:
    """One launcher in the running loop, its lines, and its children's exits."""

    def __init__(self, script: str, environment: dict[str, str] | None = None) -> None:
        self.lines: list[tuple[int, str]] = []
        self.exits: dict[int, asyncio.Future[int]] = {}
        self._line_came = asyncio.Event()
        self.launcher = ProcessLauncher(
            lambda index: environment or dict(os.environ),
            self._write,
            log_level="debug",
            command=(sys.executable, "-c", script),
        )

    def spawn(self, index: int):
        future = self.exits[index] = asyncio.get_running_loop().create_future()
        return self.launcher.spawn(index, f"w{index}", "ipc:///tmp/none", future.set_result)

    async def exit_status(self, index: int) -> int:
        return await asyncio.wait_for(self.exits[index], DEADLINE_S)

    async def wait_for_lines(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.lines) < count:
                self._line_came.clear()
                await self._line_came.wait()

    async def wait_for_line(self, index: int, text: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (index, text) not in self.lines:
                self._line_came.clear()
                await self._line_came.wait()

    def _write(self, index: int, line: str) -> None:
        self.lines.append((index, line))
        self._line_came.set()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def gone(pid: int) -> None:
    """Wait until a killed grandchild is gone, which only its new parent is told."""
    async with asyncio.timeout(DEADLINE_S):
        while alive(pid):
            await asyncio.sleep(0.01)


def test_a_worker_gets_its_arguments_and_its_output_is_read() -> None:
    async def scenario() -> None:
        run = Run("import sys; print(sys.argv[1:]); print('no newline', end='', file=sys.stderr)")
        child = run.spawn(3)
        assert await run.exit_status(3) == 0
        assert not psutil.pid_exists(child.pid), "not reaped"
        texts = [line for index, line in run.lines if index == 3]
        said = " ".join(texts)
        for expected in (
            "'--endpoint', 'ipc:///tmp/none'",
            "'--identity', 'w3'",
            f"'--parent-pid', '{os.getpid()}'",
            "'--death-fd'",
            "'--log-level', 'debug'",
            "no newline",
        ):
            assert expected in said

    asyncio.run(scenario())


def test_statuses_and_signals_are_told_apart() -> None:
    async def scenario() -> None:
        run = Run("import os, signal; os._exit(3)")
        run.spawn(0)
        assert await run.exit_status(0) == 3
        run = Run(WAIT_FOR_PARENT)
        child = run.spawn(0)
        await run.wait_for_line(0, "up")
        os.kill(child.pid, signal.SIGUSR1)
        assert await run.exit_status(0) == -signal.SIGUSR1
        child.kill()
        child.abort()

    asyncio.run(scenario())


DUMPS = """
import faulthandler, signal, time
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("platform", "survives"), [("darwin", True), ("linux", False)])
def test_a_worker_that_hangs_writes_its_stacks_and_is_killed_where_it_survives_that(
    platform: str, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlx_dp.orchestrator.process.launcher.stack_dump_signal",
        lambda: stack_dump_signal(platform),
    )

    async def scenario() -> None:
        run = Run(DUMPS)
        child = run.spawn(0)
        await run.wait_for_line(0, "up")
        child.abort()
        while not any("most recent call first" in line for _, line in run.lines):
            await run.wait_for_lines(len(run.lines) + 1)
        if survives:
            assert not run.exits[0].done()
            child.kill()
        assert await run.exit_status(0) == (-signal.SIGKILL if survives else -signal.SIGABRT)

    asyncio.run(scenario())


def test_each_worker_leads_its_own_group_and_the_group_is_killed() -> None:
    script = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(inner.pid, flush=True)
time.sleep(600)
"""

    async def scenario() -> None:
        run = Run(script)
        child = run.spawn(0)
        await run.wait_for_lines(1)
        inner = int(run.lines[0][1])
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
        assert os.getpgid(inner) == child.pid
        child.kill()
        assert await run.exit_status(0) == -signal.SIGKILL
        await gone(inner)

    asyncio.run(scenario())


class KqueueOfMacOS:
    """Reports a child's exit as macOS does, built from this system's means."""

    def __init__(self, wait: Callable[[int], None]) -> None:
        self._wait = wait

    def control(self, events: list[SimpleNamespace], count: int) -> list[SimpleNamespace]:
        [event] = events
        assert count == 1
        assert event.fflags == 4
        self._wait(event.ident)
        return events

    def close(self) -> None:
        """There is no descriptor."""


def select_of_macos(kqueue: Callable[[], object]) -> SimpleNamespace:
    return SimpleNamespace(
        kqueue=kqueue,
        kevent=lambda ident, **fields: SimpleNamespace(ident=ident, **fields),
        KQ_FILTER_PROC=1,
        KQ_EV_ADD=2,
        KQ_EV_ONESHOT=3,
        KQ_NOTE_EXIT=4,
    )


@pytest.fixture(params=["pidfd", "waitid", "kqueue"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which the end of a child is noticed."""
    if request.param == "pidfd":
        if not hasattr(os, "pidfd_open"):
            pytest.skip("this system has no pidfds")
    else:
        monkeypatch.setattr(exit_watch, "_open_pidfd", lambda pid: None)
    if request.param == "waitid" and not hasattr(os, "waitid"):
        pytest.skip("this Python has no waitid")
    if request.param == "kqueue":
        if hasattr(select, "kqueue"):
            monkeypatch.delattr(os, "waitid", raising=False)
            return "kqueue"
        by_waitid = exit_watch._wait_by_waitid
        monkeypatch.setattr(exit_watch, "_wait_by_waitid", exit_watch._wait_by_kqueue)
        like_macos = select_of_macos(lambda: KqueueOfMacOS(by_waitid))
        monkeypatch.setattr(exit_watch, "select", like_macos)
    return str(request.param)


LEFTOVERS = """
import os, subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(inner.pid, flush=True)
os._exit(1)
"""


def test_what_a_dead_worker_leaves_behind_goes_too(watch: str) -> None:
    async def scenario() -> None:
        run = Run(LEFTOVERS)
        child = run.spawn(0)
        assert await run.exit_status(0) == 1
        await gone(int(run.lines[0][1]))
        assert not psutil.pid_exists(child.pid), "not reaped"

    asyncio.run(scenario())


def test_a_signal_to_one_that_has_just_ended_spares_nothing_of_its_group() -> None:
    async def scenario() -> None:
        run = Run(LEFTOVERS)
        child = run.spawn(0)
        # The loop stands still, so its end is not yet noticed when the signal is sent.
        while alive(child.pid):
            time.sleep(0.01)
        child.abort()
        assert await run.exit_status(0) == 1
        await gone(int(run.lines[0][1]))

    asyncio.run(scenario())


def test_a_worker_holds_no_siblings_death_pipe() -> None:
    script = """
import os, sys
print(sorted(int(fd) for fd in os.listdir("/dev/fd") if int(fd) > 2), flush=True)
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print(options["--death-fd"], flush=True)
os.read(int(options["--death-fd"]), 1)
"""

    async def scenario() -> None:
        run = Run(script)
        children = [run.spawn(index) for index in range(3)]
        await run.wait_for_lines(6)
        for index in range(3):
            opened, own = (line for owner, line in run.lines if owner == index)
            # The listing itself opens one more.
            assert len(opened.split(",")) == 2, opened
            assert own in opened
        for index, child in enumerate(children):
            child.kill()
            await run.exit_status(index)

    asyncio.run(scenario())


def test_a_killed_worker_is_noticed_and_reaped(watch: str) -> None:
    async def scenario() -> None:
        run = Run(WAIT_FOR_PARENT)
        child = run.spawn(0)
        await run.wait_for_line(0, "up")
        child.kill()
        assert await run.exit_status(0) == -signal.SIGKILL
        assert not psutil.pid_exists(child.pid)

    asyncio.run(scenario())


def test_a_kqueue_waits_until_there_is_a_descriptor_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    answers: list[object] = [
        OSError(errno.EMFILE, "too many open files"),
        KqueueOfMacOS(waited.append),
    ]

    def kqueue() -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(exit_watch, "select", select_of_macos(kqueue))
    monkeypatch.setattr(exit_watch, "_RETRY_S", 0.0)
    exit_watch._wait_by_kqueue(7)
    assert waited == [7]


def test_a_spawn_that_fails_leaks_no_descriptor() -> None:
    def broken(index: int, line: str) -> None:
        raise AssertionError

    async def scenario() -> None:
        launcher = ProcessLauncher(
            lambda index: {}, broken, log_level="info", command=("/nonexistent/program",)
        )
        before = len(os.listdir("/dev/fd"))
        on_exit: Callable[[int], None] = lambda status: None  # noqa: E731
        with pytest.raises(OSError, match="nonexistent"):
            launcher.spawn(0, "w0", "ipc:///tmp/none", on_exit)
        assert len(os.listdir("/dev/fd")) == before

    asyncio.run(scenario())


def test_a_spawn_without_files_left_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = [os.pipe()]

    def pipe() -> tuple[int, int]:
        if not pipes:
            raise OSError(errno.EMFILE, "too many open files")
        return pipes.pop()

    descriptors = pipes[0]
    monkeypatch.setattr(os, "pipe", pipe)
    launcher = ProcessLauncher(lambda _: {}, lambda *_: None, log_level="info")
    with pytest.raises(OSError, match="too many"):
        launcher.spawn(0, "w0", "ipc:///tmp/none", lambda _: None)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_no_worker_is_started_where_its_connection_would_find_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libzmq ends the whole process then, and with it the requests of all other workers."""
    opened: list[int] = []

    def open_file(path: str, flags: int) -> int:
        if len(opened) == 15:
            raise OSError(errno.EMFILE, "too many open files")
        opened.append(os.dup(2))
        return opened[-1]

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pipe", lambda: pytest.fail("it was started"))
    launcher = ProcessLauncher(lambda _: {}, lambda *_: None, log_level="info")
    with pytest.raises(OSError, match="too many"):
        launcher.spawn(0, "w0", "ipc:///tmp/none", lambda _: None)
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_long_lines_are_cut_not_kept() -> None:
    async def scenario() -> None:
        run = Run("print('x' * 100_000)")
        run.spawn(0)
        assert await run.exit_status(0) == 0
        assert sum(len(line) for _, line in run.lines) == 100_000
        assert len(run.lines) > 1

    asyncio.run(scenario())


def test_a_worker_stopped_by_a_signal_is_told_from_one_that_runs() -> None:
    async def scenario() -> None:
        run = Run(WAIT_FOR_PARENT)
        child = run.spawn(0)
        await run.wait_for_line(0, "up")
        for number, halted in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            os.kill(child.pid, number)
            async with asyncio.timeout(DEADLINE_S):
                while child.halted is not halted:
                    await asyncio.sleep(0.01)
        child.kill()
        await run.exit_status(0)
        assert not child.halted

    asyncio.run(scenario())
