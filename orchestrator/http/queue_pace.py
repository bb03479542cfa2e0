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
SHORTEST_INTERVAL_S: Final = 0.001


class QueuePace:
    """Observes when requests end, since each end makes room for one more.

    Each client that is sent away is promised an end of its own: a flood that is told the same
    second by all comes back in that second, and is sent away again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)
        self._promised = 0

    def retry_after_s(self) -> int:
        """Return whole seconds until a place is likely to be free, and promise it away."""
        if len(self._ends) < 2:
            return RETRY_BUSY_S
        interval_s = self._interval_s(self._clock())
        # Whoever was promised more than that has not waited for it.
        most = math.ceil(LONGEST_RETRY_S / max(interval_s, SHORTEST_INTERVAL_S))
        self._promised = min(self._promised + 1, most)
        wait_s = math.ceil(self._promised * interval_s)
        return min(max(RETRY_BUSY_S, wait_s), LONGEST_RETRY_S)

    def _interval_s(self, now: float) -> float:
        """Seconds from one end to the next, the silence since the last one included."""
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
        self._promised = max(0, self._promised - 1)
