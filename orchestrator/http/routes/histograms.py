"""Histograms of request timings, for /metrics. An observer of the controller."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mlx_dp.orchestrator.service_counters import RequestTimings

_LATENCY_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
_TOKEN_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip


class Timings:
    """A histogram of seconds that several metric names may show."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs of upper bound and cumulative count, as Prometheus needs them."""
        names = [*map(str, self._bounds), "+Inf"]
        pairs: list[tuple[str, float]] = []
        count = 0
        for name, here in zip(names, self._counts, strict=True):
            count += here
            pairs.append((name, count))
        return pairs


@dataclass(slots=True)
class RequestHistograms:
    """Observes the service. Seconds count from the arrival in the queue."""

    queued: Timings = field(default_factory=lambda: Timings(_LATENCY_S))
    to_first_token: Timings = field(default_factory=lambda: Timings(_LATENCY_S))
    inter_token: Timings = field(default_factory=lambda: Timings(_TOKEN_S))
    per_output_token: Timings = field(default_factory=lambda: Timings(_TOKEN_S))
    end_to_end: Timings = field(default_factory=lambda: Timings(_LATENCY_S))

    def started(self, queued_s: float) -> None:
        self.queued.observe(queued_s)

    def first_token(self, waited_s: float) -> None:
        self.to_first_token.observe(waited_s)

    def next_tokens(self, gap_s: float) -> None:
        self.inter_token.observe(gap_s)

    def ended(self, timings: RequestTimings) -> None:
        self.end_to_end.observe(timings.ended_s)
        if timings.time_per_output_token_s is not None:
            self.per_output_token.observe(timings.time_per_output_token_s)
