"""SIGHUP: a restart that is asked for, or the end of the terminal that the service runs in."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Final


class HangUp:
    """Calls ``on_restart`` for each signal, but ``on_end`` once its terminal is gone."""

    def __init__(
        self,
        on_restart: Callable[[], None],
        on_end: Callable[[], None],
        *,
        is_terminal: Callable[[int], bool] = os.isatty,
        descriptor: int = 2,
    ) -> None:
        self._on_restart: Final = on_restart
        self._on_end: Final = on_end
        self._is_terminal: Final = is_terminal
        self._descriptor: Final = descriptor
        self._had_terminal: Final = is_terminal(descriptor)

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGHUP, self.received)

    def received(self) -> None:
        # The same signal says that a window was closed. Then its terminal answers no more.
        if self._had_terminal and not self._is_terminal(self._descriptor):
            self._on_end()
        else:
            self._on_restart()
