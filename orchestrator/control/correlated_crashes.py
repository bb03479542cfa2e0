"""Deaths that come together. Whoever kills all workers at once is no request of theirs."""

from collections import deque
from typing import Final

TOGETHER_S: Final = 0.25
"""Three deaths within it are an accident. One request takes workers down one after another, and
alone: a fresh worker takes about this long to start."""


class CorrelatedCrashes:
    """The deaths of the last moment, each with the requests that the worker had accepted."""

    def __init__(self) -> None:
        self._deaths: Final[deque[tuple[float, frozenset[int]]]] = deque()

    def add(self, request_ids: frozenset[int], now: float) -> None:
        """A worker has died by its own fault."""
        self._deaths.append((now, request_ids))
        while now - self._deaths[0][0] > TOGETHER_S:
            self._deaths.popleft()

    def spare(self, request_id: int) -> bool:
        """Whether the last death is no fault of a request that was there at the one before.

        True when another worker died in that moment, which did not run it: they have died of
        something else, and one that was moved to the next victim is not to be ended for it. That
        takes a third death: of two workers, both of which ran it, nothing tells it from poison.
        """
        present = sum(request_id in request_ids for _, request_ids in self._deaths)
        return 1 < present < len(self._deaths)
