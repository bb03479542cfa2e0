"""SIGTERM and Ctrl-C: the first asks for an orderly end, the second for an end."""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_SIGNAL_BASE: Final = 128
"""Plus the signal's number: the status of an end at once."""


class StopSignals:
    """``requested`` is set by the first signal; ``at_once`` is called for each further one."""

    def __init__(self, at_once: Callable[[signal.Signals], None]) -> None:
        self.requested = asyncio.Event()
        self._at_once = at_once

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            self._at_once(number)
        self.requested.set()
