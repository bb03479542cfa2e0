"""A service in a real terminal: its window closes, it runs under nohup, or gets SIGHUP."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.served import COMMAND, alive, wait_until

pytestmark = pytest.mark.system

# A terminal's session leader, as the shell in a window is.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
SERVE = " ".join(COMMAND) + " --engine fake --dp-size 2 --port 0"


class Window:
    """A terminal with a shell in it, and its screen."""

    def __init__(self, command: Sequence[str]) -> None:
        self._keeper, terminal = os.openpty()
        self.shell = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self.shown = ""
        self._open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text: str) -> None:
        os.write(self._keeper, text.encode())

    def close(self) -> None:
        if self._open:
            self._open = False
            # A pending read would hold the terminal open.
            self._reader.join(60.0)
            os.close(self._keeper)

    def _read(self) -> None:
        while self._open:
            if not select.select([self._keeper], [], [], 0.1)[0]:
                continue
            try:
                self.shown += os.read(self._keeper, 65_536).decode(errors="replace")
            except OSError:
                # The shell has ended.
                return


@contextmanager
def window(line: str) -> Iterator[Window]:
    made = Window(["bash", "--norc", "-c", line])
    processes: list[psutil.Process] = []
    try:
        yield made
    finally:
        processes += tree(made)
        made.close()
        for process in processes:
            if process.is_running():
                process.kill()
        made.shell.wait(60.0)


def tree(made: Window) -> list[psutil.Process]:
    try:
        return psutil.Process(made.shell.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def services(made: Window) -> list[psutil.Process]:
    """The controller, without its workers."""
    return [each for each in tree(made) if "serve" in each.cmdline() and "--port" in each.cmdline()]


def workers(controller: psutil.Process) -> list[psutil.Process]:
    return controller.children(recursive=True)


def said(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


@pytest.mark.parametrize(
    "output",
    ["2>&1 | tee {log} >/dev/null", pytest.param(">{log} 2>&1", marks=pytest.mark.slow)],
)
def test_a_window_that_closes_ends_the_service_wherever_its_log_goes(
    output: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with window(f"{SERVE} {output.format(log=log)}; true") as made:
        wait_until(lambda: said(log, "ready at"), "it is ready")
        (controller,) = services(made)
        children = workers(controller)
        assert len(children) == 2
        # The terminal lives, so SIGHUP requests a restart.
        controller.send_signal(signal.SIGHUP)
        wait_until(lambda: said(log, "SIGHUP: restarting workers 0, 1"), "it restarts")
        assert alive(controller)
        made.close()
        wait_until(lambda: not alive(controller), "it has ended")
        wait_until(lambda: not any(map(alive, children)), "its workers are gone")


def test_under_nohup_it_outlives_the_window_and_says_how_to_restart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with window(f"nohup {SERVE} >{log} 2>&1; true") as made:
        wait_until(lambda: said(log, "ready at"), "it is ready")
        assert said(log, "SIGHUP stays ignored")
        assert said(log, "POST /workers/{n}/restart")
        (controller,) = services(made)
        children = workers(controller)
        made.close()
        made.shell.wait(60.0)
        controller.send_signal(signal.SIGHUP)
        assert [each.pid for each in workers(controller)] == [each.pid for each in children]
        controller.send_signal(signal.SIGTERM)
        wait_until(lambda: not alive(controller), "SIGTERM ends it")
        assert not said(log, "restarting")


def test_ctrl_c_in_a_terminal_is_a_drain_and_the_status_of_ctrl_c() -> None:
    with window(f"trap : INT; {SERVE}; echo it ended with $?; sleep 60") as made:
        wait_until(lambda: "ready at" in made.shown, "it is ready")
        (controller,) = services(made)
        made.type("\x03")
        wait_until(lambda: "it ended with" in made.shown, "it has ended")
        assert "it ended with 130" in made.shown
        assert "draining 0 requests" in made.shown
        assert "Traceback" not in made.shown
        assert not alive(controller)


def test_ctrl_c_while_workers_load_is_quick_and_shows_no_traceback() -> None:
    with window(
        f"trap : INT; {SERVE} --fake-load-time 300; echo it ended with $?; sleep 60"
    ) as made:
        wait_until(lambda: "loading" in made.shown, "the display is there")
        made.type("\x03")
        wait_until(lambda: "it ended with" in made.shown, "it has ended")
        assert "it ended with 130" in made.shown
        assert "Traceback" not in made.shown
