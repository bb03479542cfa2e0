"""A standard error that never blocks its writers: unread output is dropped and counted."""

import atexit
import os
import select
import sys
import threading
from collections import deque
from typing import Final

from mlx_dp.proto.descriptor_text import DescriptorText, dropped_words

MAX_QUEUED_NBYTES: Final = 256 * 2**10
"""Beyond this the oldest output is dropped, so that the newest is always there."""
EXIT_FLUSH_S: Final = 0.5
"""How long an exit waits for queued output to be read."""
_WRITE_NBYTES: Final = 64 * 2**10
_STANDARD_DESCRIPTORS: Final = (0, 1, 2)


class DroppingStream(DescriptorText):
    """A text stream whose descriptor is written by a separate thread.

    An unread pipe, a stopped terminal or a full disk holds up only that thread. The descriptor
    stays blocking: O_NONBLOCK belongs to the open file, which is shared with the shell and every
    other process that inherited it.
    """

    def __init__(
        self, descriptor: int, *, encoding: str = "utf-8", max_nbytes: int = MAX_QUEUED_NBYTES
    ) -> None:
        super().__init__(descriptor, encoding)
        self._max_nbytes: Final = max_nbytes
        # Reentrant: signal handlers and finalizers may write during a write.
        self._changed: Final = threading.Condition(threading.RLock())
        self._queue: Final[deque[bytes]] = deque()
        self._queued_nbytes = 0
        self._writing = False
        self._within_line = False
        self._dropped = 0
        self._untold = 0
        threading.Thread(target=self._write_on, name="stderr-writer", daemon=True).start()

    @property
    def dropped_lines(self) -> int:
        """Lines dropped since the start."""
        return self._dropped

    def write(self, text: str) -> int:
        """Queue the text. Never waits and never fails."""
        output = text.encode(self.encoding, self.errors)
        if not output:
            return 0
        with self._changed:
            self._queue.append(output)
            self._queued_nbytes += len(output)
            while self._queued_nbytes > self._max_nbytes:
                oldest = self._queue.popleft()
                self._queued_nbytes -= len(oldest)
                self._drop(oldest)
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can, and ``drain`` waits for it."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until all output is written or dropped; return False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                told, self._untold = self._untold, 0
                batch = self._take_batch()
                self._writing = True
            left = self._put(self._notice(told) + batch if told else batch)
            with self._changed:
                self._writing = False
                if left:
                    # The notice itself does not count as dropped output.
                    self._drop(left[-len(batch) :])
                    self._untold += told
                self._changed.notify_all()

    def _take_batch(self) -> bytes:
        batch = [self._queue.popleft()]
        nbytes = len(batch[0])
        while self._queue and nbytes + len(self._queue[0]) <= _WRITE_NBYTES:
            batch.append(self._queue.popleft())
            nbytes += len(batch[-1])
        self._queued_nbytes -= nbytes
        return b"".join(batch)

    def _notice(self, dropped: int) -> bytes:
        lines = dropped_words(dropped)
        words = f"mlx-dp: warning: {lines}: standard error was not read, or was full\n"
        return (b"\n" if self._within_line else b"") + words.encode()

    def _drop(self, output: bytes) -> None:
        lines = output.count(b"\n")
        self._dropped += lines
        self._untold += lines

    def _put(self, output: bytes) -> bytes:
        """Write until done, however long it takes; return the part that the system refused."""
        while output:
            try:
                written = os.write(self._descriptor, output)
            except BlockingIOError:
                # Another process that shares the open file made it non-blocking.
                select.select([], [self._descriptor], [])
                continue
            except OSError:
                # The reader is gone, or the disk is full. A later write may succeed.
                return output
            self._within_line = output[written - 1] != ord("\n")
            output = output[written:]
        return b""


def open_standard_descriptors() -> None:
    """Open as /dev/null the standard descriptors that were closed at the start.

    Otherwise the next file or socket would get the number, and receive log output.
    """
    for descriptor in _STANDARD_DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, (opened, descriptor)
            os.set_inheritable(descriptor, True)


def install_dropping_stderr() -> None:
    """Make ``sys.stderr`` a ``DroppingStream``, which is drained at exit."""
    # None when the descriptor was closed.
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    sys.stderr = DroppingStream(2, encoding=encoding)
    atexit.register(drain_stderr, EXIT_FLUSH_S)


def drain_stderr(timeout_s: float) -> None:
    """Wait for queued output to be written, if ``sys.stderr`` is a ``DroppingStream``."""
    if isinstance(sys.stderr, DroppingStream):
        sys.stderr.drain(timeout_s)


def dropped_lines() -> int:
    """Lines of standard error dropped since the start."""
    return sys.stderr.dropped_lines if isinstance(sys.stderr, DroppingStream) else 0
