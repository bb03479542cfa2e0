"""Samples a process's memory, and checks that it does not grow."""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import psutil

ALLOWED_GROWTH: Final = 1.05
FULL: Final = 0.9
ALLOWED_OVERSHOOT: Final = 1.05
"""Allowed excess over the budget between loop runs: an ending request has copies in the cache."""


@dataclass(slots=True)
class BudgetWatch:
    """The most memory that an owner held, against its budget; None: no budget."""

    budget_nbytes: int | None
    most_nbytes: int = 0

    def look(self, held_nbytes: int, *, running: int) -> None:
        # The last running request is never preempted, so it alone may exceed the budget.
        if running > 1:
            self.most_nbytes = max(self.most_nbytes, held_nbytes)

    def __str__(self) -> str:
        budget = self.budget_nbytes
        of = "no budget" if budget is None else f"a budget of {budget / 2**20:.1f} MiB"
        return f"at most {self.most_nbytes / 2**20:.1f} MiB held, of {of}"

    @property
    def was_full(self) -> bool:
        budget = self.budget_nbytes
        return budget is None or self.most_nbytes >= budget * FULL

    def faults(self) -> list[str]:
        budget = self.budget_nbytes
        fits = budget is None or self.most_nbytes <= budget * ALLOWED_OVERSHOOT
        return [] if fits else [str(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    requests: int
    rss_nbytes: int
    active_nbytes: int
    cached_nbytes: int
    held_nbytes: int
    """The bytes that the owner's budget counts."""

    @classmethod
    def take(cls, requests: int, held_nbytes: int) -> "MemorySample":
        mx.synchronize()
        return cls(
            requests=requests,
            rss_nbytes=int(psutil.Process().memory_info().rss),
            active_nbytes=mx.get_active_memory(),
            cached_nbytes=mx.get_cache_memory(),
            held_nbytes=held_nbytes,
        )

    def row(self) -> list[str]:
        sizes = (self.rss_nbytes, self.active_nbytes, self.cached_nbytes, self.held_nbytes)
        return [str(self.requests), *(f"{size / 2**20:.1f} MiB" for size in sizes)]


def growth(first: MemorySample, last: MemorySample) -> list[str]:
    """Return sentences about values that grew by more than is allowed.

    The bytes that the owner's budget counts are subtracted: they are bounded, and vary as
    prefixes come and go.
    """
    pairs = {
        "RSS": (first.rss_nbytes, last.rss_nbytes),
        "MLX active memory": (first.active_nbytes, last.active_nbytes),
        "MLX active and cache memory": (
            first.active_nbytes + first.cached_nbytes,
            last.active_nbytes + last.cached_nbytes,
        ),
    }
    held = last.held_nbytes - first.held_nbytes
    return [
        f"{name} grew from {before / 2**20:.1f} MiB after {first.requests} requests to "
        f"{after / 2**20:.1f} MiB after {last.requests}, of which {held / 2**20:.1f} MiB counted"
        for name, (before, after) in pairs.items()
        if after - held > before * ALLOWED_GROWTH
    ]
