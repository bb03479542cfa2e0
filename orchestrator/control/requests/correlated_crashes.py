"""Detects correlated crashes, so that no single request is blamed for them."""

from collections import deque
from typing import Final

CORRELATION_WINDOW_S: Final = 0.25
"""Three crashes within this time have a common cause. A single request crashes one worker after
another, and a new worker needs about this long to start."""


class CorrelatedCrashes:
    """The crashes within the window, each with the requests that the worker had accepted."""

    def __init__(self) -> None:
        self._crashes: Final[deque[tuple[float, frozenset[int]]]] = deque()

    def add(self, request_ids: frozenset[int], now: float) -> None:
        """Record a crash that was the worker's own fault."""
        self._crashes.append((now, request_ids))
        while now - self._crashes[0][0] > CORRELATION_WINDOW_S:
            self._crashes.popleft()

    def exonerates(self, request_id: int) -> bool:
        """Whether the request is not to blame for the last crash, although it ran in several.

        True if a worker that did not run it also crashed in that time: then the crashes have
        another cause, and the request only moved from one victim to the next. This needs a third
        crash, since two crashed workers that both ran the request suggest that it caused them.
        """
        present = sum(request_id in request_ids for _, request_ids in self._crashes)
        return 1 < present < len(self._crashes)
