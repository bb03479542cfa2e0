"""When a client that found the queue full should come back."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.control.counters import RequestTimings
from mlx_dp.orchestrator.service import RETRY_BUSY_S

# Enough to level out a mixture of lengths, and few enough to follow a change of load.
REMEMBERED_ENDS: Final = 32
LONGEST_RETRY_S: Final = 60


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What a full queue waits for: requests that are served at once, and the places it has."""

    serving: int
    places: int


def end_interval_s(served_s: Sequence[float], *, serving: int, silence_s: float) -> float:
    """Estimate the seconds from one end of a request to the next, each of which frees a place.

    ``served_s``: how long the last requests took from their grant to their end. ``silence_s``: how
    long those that are ``serving`` now have run without an end. The silence counts as long as one
    more request might, so that requests that take longer than those before raise the estimate.
    """
    at_once = max(1, serving)
    total_s = sum(served_s) / at_once
    measured_s = total_s / len(served_s) if served_s else 0.0
    return max(measured_s, (total_s + silence_s) / (len(served_s) + 1))


def next_promise_s(promised_s: float, *, interval_s: float, places: int) -> float:
    """Return how far ahead the next client is sent, if the last one was sent ``promised_s`` ahead.

    Each is sent to an end of its own: a flood that is told one and the same second by all comes
    back in that second, and is sent away again. After as many ends as the queue has places all of
    it has changed, so that none has to stay away for longer.
    """
    turn_s = min(places * interval_s, LONGEST_RETRY_S)
    return min(max(0.0, promised_s) + interval_s, turn_s)


class QueuePace:
    """Observes how long requests take, and sends clients away for as long as a place takes.

    Time in which there was nothing to do is no part of the pace: ``idle`` tells of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_s: deque[float] = deque(maxlen=REMEMBERED_ENDS)
        self._silent_since = clock()
        self._promised_until = 0.0

    def idle(self) -> None:
        """A request has come and found no other."""
        self._silent_since = self._clock()

    def retry_after_s(self, load: QueueLoad) -> int:
        """Return whole seconds until a place is likely to be free, and promise it away."""
        now = self._clock()
        interval_s = end_interval_s(
            self._served_s, serving=load.serving, silence_s=now - self._silent_since
        )
        wait_s = next_promise_s(
            self._promised_until - now, interval_s=interval_s, places=load.places
        )
        self._promised_until = now + wait_s
        # Sums of floats that stand for whole seconds may lie above them.
        return max(RETRY_BUSY_S, math.ceil(round(wait_s, 6)))

    def started(self, queued_s: float) -> None:
        """A start takes no place away that was free."""

    def first_token(self, waited_s: float) -> None:
        """Tokens say nothing about ends."""

    def next_tokens(self, gap_s: float) -> None:
        """Tokens say nothing about ends."""

    def ended(self, timings: RequestTimings) -> None:
        self._silent_since = self._clock()
        if timings.granted_s is not None:
            self._served_s.append(timings.ended_s - timings.granted_s)
