"""Runs a helper command of the worker package in a child, and reads its JSON lines."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_dp.orchestrator.process.stop_signals import stop_signals_blocked
from mlx_dp.proto.errors import ConfigError

_STDERR_TAIL = 600


def run_child(
    arguments: list[str],
    on_line: Callable[[dict[str, Any]], None],
    *,
    timeout_s: float | None = None,
    keep_open: tuple[int, ...] = (),
) -> None:
    """Run ``python -m mlx_dp.worker <arguments>`` to its end.

    Raises ConfigError for a line ``{"error": ...}`` and for a failing child. Any other exception
    here also kills the child. The child inherits the files ``keep_open``.
    """
    with tempfile.TemporaryFile() as stderr, _death_pipe() as death_fd:
        with stop_signals_blocked():
            child = subprocess.Popen(
                _command(arguments, death_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                pass_fds=(death_fd, *keep_open),
            )
        overdue = threading.Event()
        alarm = _alarm(child, overdue, timeout_s)
        try:
            error = _read_lines(child, on_line)
            status = child.wait()
        finally:
            alarm.cancel()
            child.kill()
            child.wait()
        if overdue.is_set():
            raise ConfigError(f"'{arguments[0]}' took longer than {timeout_s:g} s and was stopped")
        if error is not None:
            raise ConfigError(error)
        if status != 0:
            raise ConfigError(_account(arguments[0], status, _tail(stderr.fileno())))


def _command(arguments: list[str], death_fd: int) -> list[str]:
    name, *rest = arguments
    watch = ["--parent-pid", str(os.getpid()), "--death-fd", str(death_fd)]
    return [sys.executable, "-m", "mlx_dp.worker", name, *watch, *rest]


@contextmanager
def _death_pipe() -> Iterator[int]:
    """Yield the read end of a pipe whose write end closes when this process ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def _alarm(
    child: subprocess.Popen[str], overdue: threading.Event, timeout_s: float | None
) -> threading.Timer:
    def ring() -> None:
        overdue.set()
        child.kill()

    alarm = threading.Timer(timeout_s or threading.TIMEOUT_MAX, ring)
    alarm.daemon = True
    if timeout_s is not None:
        alarm.start()
    return alarm


def _read_lines(
    child: subprocess.Popen[str], on_line: Callable[[dict[str, Any]], None]
) -> str | None:
    """Pass each message to ``on_line``; return the sentence of an error line, if any."""
    assert child.stdout is not None
    error: str | None = None
    with child.stdout as lines:
        for line in lines:
            message = _message(line)
            if message is None:
                continue
            if "error" in message:
                # On one line, whatever the library wrote.
                error = " ".join(str(message["error"]).split())
            else:
                on_line(message)
    return error


def _message(line: str) -> dict[str, Any] | None:
    """Parse a line of the child. Libraries also print to stdout, but no JSON objects."""
    if not line.startswith("{"):
        return None
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return message


def _tail(descriptor: int) -> str:
    with open(descriptor, "rb", closefd=False) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _STDERR_TAIL))
        return file.read().decode("utf-8", "replace").strip()


def _account(name: str, status: int, stderr: str) -> str:
    if status < 0:
        cause = f"was ended by signal {-status}"
        hint = " (9 is often a lack of memory)" if status == -9 else ""
    else:
        cause, hint = f"failed with status {status}", ""
    last = stderr.splitlines()[-1] if stderr else "it said nothing"
    return f"the child process '{name}' {cause}{hint}: {last}"
