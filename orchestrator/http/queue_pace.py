"""When a client that found the queue full should come back."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.control.counters import RequestTimings
from mlx_dp.orchestrator.service import RETRY_BUSY_S

# Enough to level out a batch that ends at once, and few enough to follow a change of load.
REMEMBERED_ENDS: Final = 32
LONGEST_RETRY_S: Final = 60


class QueuePace:
    """Observes when requests end, since each end makes room for one more.

    Each client that is sent away is promised a place of its own: a flood that is told the same
    second by all comes back in that second, and is sent away again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)
        self._promised_until = 0.0

    def retry_after_s(self) -> int:
        """Return whole seconds until a place is likely to be free, and promise it away."""
        now = self._clock()
        latest = now + LONGEST_RETRY_S
        place_at = min(max(now, self._promised_until) + self._interval_s(now), latest)
        self._promised_until = place_at
        return max(RETRY_BUSY_S, math.ceil(place_at - now))

    def _interval_s(self, now: float) -> float:
        """Seconds from one end to the next, the silence since the last one included."""
        if len(self._ends) < 2:
            return RETRY_BUSY_S
        mean_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(mean_s, (now - self._ends[-1]) / len(self._ends))

    def started(self, queued_s: float) -> None:
        """A start takes no place away that was free."""

    def first_token(self, waited_s: float) -> None:
        """Tokens say nothing about ends."""

    def next_tokens(self, gap_s: float) -> None:
        """Tokens say nothing about ends."""

    def ended(self, timings: RequestTimings) -> None:
        self._ends.append(self._clock())
