"""SIGHUP: restarts the workers, or ends the service when its terminal was closed."""

import asyncio
import errno
import os
import select
import signal
from collections.abc import Callable
from typing import Final

_GONE: Final = (errno.ENXIO, errno.EIO, errno.ENOENT, errno.ENODEV, errno.ENOTTY)
_TERMINAL: Final = "/dev/tty"


class SighupHandler:
    """Calls ``on_restart`` for each SIGHUP, or ``on_end`` once the controlling terminal is gone.

    A daemon never had a terminal, so it always restarts. Standard error does not tell the two
    apart: ``serve 2>&1 | tee log`` runs in a terminal too.
    """

    def __init__(
        self,
        on_restart: Callable[[], None],
        on_end: Callable[[], None],
        *,
        has_terminal: Callable[[], bool] | None = None,
    ) -> None:
        self._on_restart: Final = on_restart
        self._on_end: Final = on_end
        self._has_terminal: Final = has_terminal or has_controlling_terminal
        self._had_terminal: Final = self._has_terminal()

    def install(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Install the handler; return False, and change nothing, when SIGHUP is ignored (nohup)."""
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            return False
        loop.add_signal_handler(signal.SIGHUP, self.received)
        return True

    def received(self) -> None:
        if self._had_terminal and not self._has_terminal():
            self._on_end()
        else:
            self._on_restart()


def has_controlling_terminal() -> bool:
    """Whether this process has a controlling terminal that still answers."""
    try:
        descriptor = os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        # Other errors, such as no free descriptor, say nothing about the terminal.
        return error.errno not in _GONE
    try:
        return _answers(descriptor)
    finally:
        os.close(descriptor)


def _answers(descriptor: int) -> bool:
    """Whether the terminal's other end is open. Systems report a closed one differently."""
    try:
        os.tcgetpgrp(descriptor)
    except OSError as error:
        return error.errno not in _GONE
    poll = select.poll()
    poll.register(descriptor, 0)
    return not any(event & select.POLLHUP for _, event in poll.poll(0))
