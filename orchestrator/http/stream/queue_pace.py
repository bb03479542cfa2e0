"""Estimates when a client that found the queue full should retry."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.api import RETRY_BUSY_S, ServiceState, WorkerStatus
from mlx_dp.orchestrator.service_counters import RequestTimings

# Enough ends for an average over different lengths, few enough to follow a change of load.
REMEMBERED_ENDS: Final = 32
LONGEST_RETRY_S: Final = 60


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The load of a full queue: the requests that are served, and the places in the queue."""

    serving: int
    places: int


def queue_load(state: ServiceState, preparing: int) -> QueueLoad:
    """Return the load of a full queue. Requests being prepared will take the free slots."""
    running = sum(owner.running for owner in state.owners if owner.status is WorkerStatus.READY)
    soon = min(preparing, request_slots(state, free=True))
    return QueueLoad(serving=running + soon, places=max(1, state.max_queued_requests))


def request_slots(state: ServiceState, *, free: bool) -> int:
    """Count the request slots of the ready owners, all of them or those without a request."""
    return sum(
        max(0, owner.capacity.request_slots - (owner.running if free else 0))
        for owner in state.owners
        if owner.status is WorkerStatus.READY and owner.capacity is not None
    )


def end_interval_s(served_s: Sequence[float], *, serving: int, silence_s: float) -> float:
    """Estimate the seconds between ends of requests, each of which frees a place.

    ``served_s``: times of the last requests from grant to end. ``silence_s``: time since the last
    end, while ``serving`` requests run. The silence counts as one more request, so that requests
    that take longer than earlier ones raise the estimate.
    """
    at_once = max(1, serving)
    total_s = sum(served_s) / at_once
    measured_s = total_s / len(served_s) if served_s else 0.0
    return max(measured_s, (total_s + silence_s) / (len(served_s) + 1))


def next_promise_s(promised_s: float, *, interval_s: float, places: int) -> float:
    """Return the delay for the next client, if the last one got a delay of ``promised_s``.

    Each client gets the estimated time of a different end. If all clients of a flood got the same
    second, they would return together and be refused again. Once as many requests have ended as
    the queue has places, all its places are new, so no client needs to wait longer.
    """
    turn_s = min(places * interval_s, LONGEST_RETRY_S)
    return min(max(0.0, promised_s) + interval_s, turn_s)


class QueuePace:
    """Measures how long requests take, and estimates when a place will be free.

    Idle time does not count: ``note_idle`` restarts the silence.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_s: deque[float] = deque(maxlen=REMEMBERED_ENDS)
        self._silent_since = clock()
        self._promised_until = 0.0

    def note_idle(self) -> None:
        """Note that a request arrived while there was no other."""
        self._silent_since = self._clock()

    def retry_after_s(self, load: QueueLoad) -> int:
        """Return whole seconds until a place will probably be free, and reserve that time."""
        now = self._clock()
        interval_s = end_interval_s(
            self._served_s, serving=load.serving, silence_s=now - self._silent_since
        )
        wait_s = next_promise_s(
            self._promised_until - now, interval_s=interval_s, places=load.places
        )
        self._promised_until = now + wait_s
        # Rounded first: sums of floats may lie slightly above whole seconds.
        return max(RETRY_BUSY_S, math.ceil(round(wait_s, 6)))

    def started(self, queued_s: float) -> None:
        """Ignored: the pace is that of ends."""

    def first_token(self, waited_s: float) -> None:
        """Ignored: the pace is that of ends."""

    def next_tokens(self, gap_s: float) -> None:
        """Ignored: the pace is that of ends."""

    def ended(self, timings: RequestTimings) -> None:
        self._silent_since = self._clock()
        if timings.granted_s is not None:
            self._served_s.append(timings.ended_s - timings.granted_s)
