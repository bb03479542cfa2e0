"""Times one request's answers."""

import time
from collections.abc import Callable

from mlx_dp.orchestrator.http.counters import HttpCounters


class AnswerMeter:
    """Times one answer, from the arrival of its request."""

    def __init__(
        self,
        counters: HttpCounters,
        arrived_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._clock = clock
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._last_at = 0.0
        self._num_tokens = 0
        self.owner: int | None = None

    def granted(self, owner: int, *, prompt_tokens: int, cached_tokens: int) -> None:
        if self.owner is None:
            self._counters.queued.observe(self._clock() - self._arrived_at)
            self._counters.prompt_tokens[owner] += prompt_tokens
            self._counters.cached_tokens[owner] += cached_tokens
        self.owner = owner

    def tokens(self, count: int) -> None:
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
            self._counters.first_token.observe(now - self._arrived_at)
        else:
            self._counters.inter_token.observe(now - self._last_at)
        self._last_at = now
        self._num_tokens += count
        self._counters.generation_tokens += count

    def refused(self) -> None:
        self._counters.requests["refused"] += 1

    def ended(self, outcome: str) -> None:
        self._counters.requests[outcome] += 1
        self._counters.end_to_end.observe(self._clock() - self._arrived_at)
        if self._first_at is not None and self._num_tokens > 1:
            decode_s = self._last_at - self._first_at
            self._counters.per_output_token.observe(decode_s / (self._num_tokens - 1))
