"""Virtual time: future acts in order, and a clock that jumps from one to the next."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Act = Callable[[], None]


class Agenda:
    """Acts at equal times happen in the order in which they were entered."""

    def __init__(self) -> None:
        self.now = 100.0
        self._due: list[tuple[float, int, Act]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    def at(self, time: float, act: Act) -> None:
        heappush(self._due, (max(time, self.now), next(self._order), act))

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self.now + delay_s, act)

    def step(self) -> None:
        """Move the clock to the next act, and do it."""
        assert self._due, "no act is left"
        self.now, _, act = heappop(self._due)
        act()
