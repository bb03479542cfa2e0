"""A worker's output to its parent's pipe, which the parent may not read for a while."""

import errno
import os
import select
import stat
import sys
import threading
from typing import Final

from mlx_dp.proto.descriptor_text import DescriptorText, dropped_words

_WAIT_S: Final = 0.05
"""How long to wait for a full pipe; not again until the parent has read something."""


class ParentOutput(DescriptorText):
    """A text stream over a descriptor that may be non-blocking. Text that does not fit is dropped.

    The calling thread writes at once, so the last words before a crash get out. A notice replaces
    dropped lines once there is room again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        # Reentrant: finalizers may write in the middle of a write.
        self._lock: Final = threading.RLock()
        self._gap = False
        self._dropped = 0
        self._within_line = False

    def write(self, text: str) -> int:
        """Write as much as fits. Never fails."""
        output = text.encode(self.encoding, self.errors)
        if not output:
            return 0
        with self._lock:
            patience_s = 0.0 if self._gap else _WAIT_S
            notice = self._notice() if self._gap else b""
            left = self._put(notice + output, patience_s)
            if len(left) <= len(output):
                # The notice, if any, was written.
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
        """Write as much as fits; return the rest."""
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
    """Make this process print without waiting for its parent to read, even from C code.

    No other process writes to its pipe, so the pipe may be made non-blocking.
    """
    for descriptor in (1, 2):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, False)
    sys.stdout, sys.stderr = ParentOutput(1), ParentOutput(2)
