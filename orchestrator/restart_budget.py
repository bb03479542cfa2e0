"""Restart budget and back-off: how often, and how soon, a worker may be restarted."""

import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """``max_restarts`` in any ``window_s``, or in a row without one that became ready."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.25
    longest_delay_s: float = 30.0
    healthy_s: float = 60.0


@dataclass(slots=True)
class RestartBudget:
    """At most ``limit`` restarts in any ``window_s`` seconds, or in a row that all fail.

    With the window alone, a worker whose model takes long to load could fail for ever.
    """

    limit: int
    window_s: float
    _starts: deque[float] = field(default_factory=deque)
    _failed_in_a_row: int = 0

    def allow(self, now: float) -> bool:
        """Take one restart out of the budget; False when it is spent."""
        if self.used(now) >= self.limit or self._failed_in_a_row >= self.limit:
            return False
        self._starts.append(now)
        self._failed_in_a_row += 1
        return True

    def used(self, now: float) -> int:
        """Restarts within the window that ends now."""
        while self._starts and now - self._starts[0] >= self.window_s:
            self._starts.popleft()
        return len(self._starts)

    def succeeded(self) -> None:
        """The worker became ready."""
        self._failed_in_a_row = 0


@dataclass(slots=True)
class BackOff:
    """Delays before a restart: doubling, with jitter, and short again after a healthy time."""

    first_s: float
    longest_s: float
    healthy_s: float
    _failures: int = 0

    def delay(self, healthy_for_s: float, rng: random.Random) -> float:
        """Return the delay after a failure; the worker had been ready for ``healthy_for_s``."""
        if healthy_for_s >= self.healthy_s:
            self._failures = 0
        # Bounded, since a float overflows at 2**1024.
        full = min(self.longest_s, self.first_s * 2.0 ** min(self._failures, 64))
        self._failures += 1
        # Replicas that crashed of one cause must not restart in step.
        return full * rng.uniform(0.5, 1.0)
