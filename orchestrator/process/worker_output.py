"""What workers print, line by line, each line under its worker's name."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

_CHUNK_NBYTES: Final = 65_536
_MAX_LINE_NBYTES: Final = 16_384


class WorkerOutput:
    """Reads the pipe that is one worker's stdout and stderr, without ever blocking.

    Owns the descriptor, and closes it at the pipe's end or in ``finish``.
    """

    def __init__(self, descriptor: int, write_line: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._write_line = write_line
        self._pending = b""
        self._open = True
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    def finish(self) -> None:
        """Take what is still in the pipe, after the worker's end. Idempotent."""
        while self._open and self._read():
            pass
        self._close()

    def _read(self) -> bool:
        """Hand on the complete lines; False when there is nothing to read now."""
        try:
            chunk = os.read(self._descriptor, _CHUNK_NBYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close()
            return False
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self._say(line)
        if len(self._pending) > _MAX_LINE_NBYTES:
            self._say(self._pending)
            self._pending = b""
        return True

    def _say(self, line: bytes) -> None:
        self._write_line(line.decode("utf-8", "replace").rstrip("\r"))

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        if self._pending:
            self._say(self._pending)
            self._pending = b""
