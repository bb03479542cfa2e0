"""Children that never see the signals by which terminals and systemd stop a service."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

_BLOCKED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Start children with SIGTERM, SIGINT and SIGHUP blocked.

    systemd and terminals send these to every process of a service, but only the parent should end
    such a child. The child inherits the mask, so that it is safe even before its first line; one
    that lives longer ignores the signals and removes the mask. Signals that reach this process
    meanwhile stay pending.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_short_child(command: Sequence[str], data: bytes) -> "subprocess.CompletedProcess[bytes]":
    """Run a child that soon ends by itself, with ``data`` as its input.

    The signal that stops the service lets running requests finish, so their children finish too.
    """
    with stop_signals_blocked():
        return subprocess.run(
            command, input=data, capture_output=True, check=False, start_new_session=True
        )
