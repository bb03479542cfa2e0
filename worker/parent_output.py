"""A worker's output, into a pipe that its parent may not read for a while."""

import errno
import os
import select
import stat
import sys
import threading
from typing import Final

from mlx_dp.proto.descriptor_text import DescriptorText, dropped_words

_WAIT_S: Final = 0.05
"""How long a full pipe is waited for: once, until something is taken again."""


class ParentOutput(DescriptorText):
    """A text stream over a descriptor that may be non-blocking: text that finds no room is dropped.

    Written at once and by the thread that says it, so that the last words before a crash are
    there. Lines that were dropped are told once there is room again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        # Reentrant: finalizers may write in the middle of a write.
        self._lock: Final = threading.RLock()
        self._gap = False
        self._dropped = 0
        self._within_line = False

    def write(self, text: str) -> int:
        """Write as much as there is room for. Never fails."""
        output = text.encode(self.encoding, self.errors)
        if not output:
            return 0
        with self._lock:
            patience_s = 0.0 if self._gap else _WAIT_S
            notice = self._notice() if self._gap else b""
            left = self._put(notice + output, patience_s)
            if len(left) <= len(output):
                # The notice is out, where there was one.
                self._dropped = 0
            self._gap = bool(left)
            self._dropped += left[-len(output) :].count(b"\n")
        return len(text)

    def flush(self) -> None:
        """Do nothing: everything is written at once."""

    def _notice(self) -> bytes:
        start = b"\n" if self._within_line else b""
        return start + f"{dropped_words(self._dropped)}: they were not read\n".encode()

    def _put(self, output: bytes, patience_s: float) -> bytes:
        """Write as much as there is room for; return the rest."""
        while output:
            try:
                written = os.write(self._descriptor, output)
            except OSError as error:
                full = error.errno == errno.EAGAIN
                if full and select.select([], [self._descriptor], [], patience_s)[1]:
                    continue
                return output
            self._within_line = output[written - 1] != ord("\n")
            output = output[written:]
        return b""


def print_to_parent() -> None:
    """Have this process print so that it never waits for its parent to read, in C code neither.

    No other process writes to its pipe, so that it may be made non-blocking.
    """
    for descriptor in (1, 2):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, False)
    sys.stdout, sys.stderr = ParentOutput(1), ParentOutput(2)
