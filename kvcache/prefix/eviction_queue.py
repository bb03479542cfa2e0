"""Eviction candidates in the order of their last use."""

import heapq
from collections.abc import Callable

SLACK = 64
"""Stale entries beyond twice the number of candidates before the heap is rebuilt."""


class EvictionQueue:
    """Candidates by the number of their last use; ``pop`` skips stale entries.

    A candidate is pushed when it is new and after each use: moving an entry within a heap costs
    more than leaving a stale one behind.
    """

    def __init__(self, last_use: Callable[[int], int | None]) -> None:
        """``last_use`` returns the last use of a candidate id; None: it is no candidate now."""
        self._last_use = last_use
        self._entries: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, candidate: int, *, living: int) -> None:
        """Add a candidate. ``living`` is an upper bound on the number of candidates."""
        use = self._last_use(candidate)
        assert use is not None, f"{candidate} cannot be evicted"
        heapq.heappush(self._entries, (use, candidate))
        if len(self._entries) > 2 * living + SLACK:
            self._entries = sorted({entry for entry in self._entries if self._valid(entry)})

    def pop(self) -> int | None:
        """Take the least recently used candidate; None when there is none."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if self._valid(entry):
                return entry[1]
        return None

    def _valid(self, entry: tuple[int, int]) -> bool:
        return self._last_use(entry[1]) == entry[0]
