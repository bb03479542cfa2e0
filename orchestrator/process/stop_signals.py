"""SIGTERM and Ctrl-C: the first asks for an orderly end, each further one for a faster end."""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.process.stop_status import orderly_status

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """``requested`` is set by the first signal, and each further one calls the next of ``again``.

    The last of ``again`` is called for every signal after it.
    """

    def __init__(self, *again: Callable[[signal.Signals], None]) -> None:
        self.requested = asyncio.Event()
        self._again = list(again)
        self._first: signal.Signals | None = None

    @property
    def status(self) -> int:
        """The exit status of the end that the first signal asked for."""
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
