"""The signals by which terminals and systemd stop the service, and the exit statuses.

SIGTERM and Ctrl-C: the first drains, each further one ends faster. Children never see them.
"""

import asyncio
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_FAILED: Final = 1
"""The service could not go on."""
EXIT_CONFIG: Final = 2
"""The configuration is wrong: another try would fail alike."""
EXIT_SIGNAL_BASE: Final = 128
"""Plus the signal number: the status of an immediate end."""
_BLOCKED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """The first signal sets ``requested``; each further one calls the next of ``again``.

    The last of ``again`` also serves every later signal.
    """

    def __init__(self, *again: Callable[[signal.Signals], None]) -> None:
        self.requested = asyncio.Event()
        self._again = list(again)
        self._first: signal.Signals | None = None

    @property
    def status(self) -> int:
        """The exit status that the first signal asks for."""
        return 0 if self._first is None else orderly_status(self._first)

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if not self.requested.is_set():
            self._first = number
            self.requested.set()
            return
        act = self._again.pop(0) if len(self._again) > 1 else self._again[0]
        act(number)


def orderly_status(number: int) -> int:
    """Return the status of an orderly end: 0, or 130 after Ctrl-C as for any program."""
    return EXIT_SIGNAL_BASE + number if number == signal.SIGINT else 0


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
