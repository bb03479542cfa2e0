"""Detects correlated crashes, so that no single request is blamed for them."""

from collections import deque
from typing import Final

TOGETHER_S: Final = 0.25
"""Three crashes within this time have a common cause. One request crashes one worker after another:
a new worker takes about this long to start."""


class CorrelatedCrashes:
    """The crashes of the last moment, each with the requests that the worker had accepted."""

    def __init__(self) -> None:
        self._crashes: Final[deque[tuple[float, frozenset[int]]]] = deque()

    def add(self, request_ids: frozenset[int], now: float) -> None:
        """A worker has crashed by its own fault."""
        self._crashes.append((now, request_ids))
        while now - self._crashes[0][0] > TOGETHER_S:
            self._crashes.popleft()

    def spare(self, request_id: int) -> bool:
        """Whether a request that ran in several of these crashes is not to blame for the last one.

        True when another worker crashed in that time that did not run it: the crashes have another
        cause, and the request was only moved from one victim to the next. That takes a third crash:
        two workers that both ran the request are what a request that crashes workers looks like.
        """
        present = sum(request_id in request_ids for _, request_ids in self._crashes)
        return 1 < present < len(self._crashes)
