"""Worker output, line by line."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Final

_CHUNK_NBYTES: Final = 65_536
_MAX_LINE_NBYTES: Final = 16_384
_LINES_PER_ITERATION: Final = 64
"""The most lines written in one iteration of the event loop, so that a flood does not stall it."""


class WorkerOutput:
    """Reads one worker's stdout and stderr from a pipe, without blocking.

    Owns the descriptor; closes it at the end of the pipe or in ``finish``.
    """

    def __init__(self, descriptor: int, write_line: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._write_line = write_line
        self._lines: deque[bytes] = deque()
        self._pending = b""
        self._open = True
        self._listening = False
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._listen(True)

    def finish(self) -> None:
        """Read what is left in the pipe after the worker's exit. Idempotent."""
        while self._open and self._read():
            self._say(len(self._lines))
        self._close()
        self._say(len(self._lines))

    def _run_once(self) -> None:
        if self._open and not self._lines:
            self._read()
        self._say(_LINES_PER_ITERATION)
        self._listen(self._open and not self._lines)
        if self._lines:
            self._loop.call_soon(self._run_once)

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._listening:
            self._loop.add_reader(self._descriptor, self._run_once)
        elif self._listening and not wanted:
            self._loop.remove_reader(self._descriptor)
        self._listening = wanted

    def _read(self) -> bool:
        """Read once; return False when there is nothing to read now."""
        try:
            chunk = os.read(self._descriptor, _CHUNK_NBYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close()
            return False
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self._lines.extend(lines)
        if len(self._pending) > _MAX_LINE_NBYTES:
            self._lines.append(self._pending)
            self._pending = b""
        return True

    def _say(self, count: int) -> None:
        for _ in range(min(count, len(self._lines))):
            self._write_line(self._lines.popleft().decode("utf-8", "replace").rstrip("\r"))

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._listen(False)
        os.close(self._descriptor)
        if self._pending:
            self._lines.append(self._pending)
            self._pending = b""
