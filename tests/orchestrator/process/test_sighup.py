"""SIGHUP: a requested restart, or the end when the terminal has gone."""

import asyncio
import errno
import os
import signal
import subprocess
import sys

import pytest

from mlx_dp.orchestrator.process.sighup import SighupHandler, has_controlling_terminal


@pytest.mark.parametrize(
    ("before", "after", "called"),
    [(True, True, "restart"), (True, False, "end"), (False, False, "restart")],
)
def test_it_ends_only_what_has_lost_its_terminal(before: bool, after: bool, called: str) -> None:
    calls: list[str] = []
    answers = iter([before, after])
    hang_up = SighupHandler(
        lambda: calls.append("restart"),
        lambda: calls.append("end"),
        has_terminal=lambda: next(answers),
    )
    hang_up.received()
    assert calls == [called]


# Standard error is no terminal: only the session's terminal counts.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
from mlx_dp.orchestrator.process.sighup import SighupHandler
terminal, is_daemon = int(sys.argv[1]), sys.argv[2] == "daemon"
if not is_daemon:
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.close(terminal)
import signal
signal.signal(signal.SIGHUP, lambda *_: None)
hang_up = SighupHandler(lambda: print("restart", flush=True), lambda: print("end", flush=True))
print("up", flush=True)
for line in sys.stdin:
    hang_up.received()
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "told"), [("terminal", ["restart", "end"]), ("daemon", ["restart", "restart"])]
)
def test_a_terminal_that_was_closed_is_told_from_one_that_lives(kind: str, told: list[str]) -> None:
    keeper, terminal = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(terminal), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=(terminal,),
    )
    os.close(terminal)
    assert child.stdin is not None and child.stdout is not None
    with child:
        assert child.stdout.readline() == "up\n"
        lines = []
        for close in (False, True):
            if close:
                os.close(keeper)
            child.stdin.write("received\n")
            child.stdin.flush()
            lines.append(child.stdout.readline().strip())
        child.stdin.close()
    assert lines == told


def test_a_want_of_descriptors_says_nothing_about_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(number: int) -> None:
        def open_file(path: str, flags: int) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", open_file)

    fail(errno.EMFILE)
    assert has_controlling_terminal()
    fail(errno.ENXIO)
    assert not has_controlling_terminal()


def test_the_signal_reaches_it() -> None:
    async def run() -> None:
        received = asyncio.Event()
        hang_up = SighupHandler(received.set, lambda: None, has_terminal=lambda: False)
        assert hang_up.install(asyncio.get_running_loop())
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            await received.wait()

    asyncio.run(run())


def test_a_signal_that_is_ignored_at_the_start_stays_so() -> None:
    async def run() -> None:
        hang_up = SighupHandler(lambda: None, lambda: None, has_terminal=lambda: False)
        assert not hang_up.install(asyncio.get_running_loop())

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(run())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
