"""Streams beside a loss: those that it does not touch, and those that the next one may hit."""

import time
from typing import Final

from scripts.benchmarks.results.report import quantile
from scripts.faults.service.client import Seen
from scripts.faults.service.process import EVENT_TIMEOUT_S, ChaosService
from scripts.faults.trials.load import Load
from scripts.faults.verdicts.verdict import RowResult

GAP_S: Final = 0.1
"""The largest allowed gap while the machine starts a worker."""
CALM_S: Final = 30.0
AFTER_S: Final = 1.0
"""Time after a loss within which it may still affect streams."""
ENOUGH_LOSSES: Final = 20
"""After this many trials, a row has met an untouched stream."""


class Bystanders:
    """Measures the gaps of other owners' streams: call ``begin`` and ``end`` around each trial.

    ``owners``: how many owners can be lost independently.
    """

    def __init__(self, service: ChaosService, load: Load, result: RowResult, owners: int) -> None:
        self._service: Final = service
        self._load: Final = load
        self._result: Final = result
        self._owners: Final = owners
        self._since = 0
        self._begun_s = 0.0
        self._lost_before_s = 0.0
        self._losses = 0

    async def watch_calm(self) -> None:
        """Measure the gaps of as many streams as there are clients, before any fault."""
        load = self._load
        await load.wait_for(lambda: len(load.ended) >= max(1, len(load.seen)), CALM_S)
        self._result.calm_gap_s += [
            seen.longest_gap_s(0.0, seen.ended_s) for seen in load.ended if len(seen.chunks_s) > 1
        ]

    def begin(self) -> None:
        self._since = self._service.mark()
        self._begun_s = time.monotonic()
        self._load.ended.clear()

    async def end(self) -> None:
        """Record the gaps, and wait until a second loss would hit no moved stream."""
        losses = self._service.losses(self._since)
        if not losses:
            return
        victims = {index for _, index in losses}
        first_s, last_s = losses[0][0], losses[-1][0]
        if not await self._load.wait_for(lambda: not self._moved(victims, last_s), EVENT_TIMEOUT_S):
            self._result.violate(f"never ended: {self._moved(victims, last_s)}")
        if len(victims) < self._owners:
            self._losses += 1
            self._take_gaps(victims, first_s, last_s)
        self._lost_before_s = last_s

    def _take_gaps(self, victims: set[int], first_s: float, last_s: float) -> None:
        for seen in (*self._load.ended, *self._load.seen.values()):
            if self._untouched(seen, victims, first_s):
                gap_s = seen.longest_gap_s(self._begun_s, last_s + AFTER_S)
                self._result.gap_s.append(gap_s)

    def judge(self, slack: float) -> None:
        """Check the gaps against their bound, at the end of the row."""
        gaps_s, calm_s = self._result.gap_s, self._result.calm_gap_s
        if gaps_s and calm_s:
            bound_s = max(2.0 * quantile(calm_s, 0.99), slack * GAP_S)
            self._result.bound("gap of untouched streams", gaps_s, bound_s)
        elif self._losses >= ENOUGH_LOSSES:
            self._result.violate("no stream was seen that was untouched by the losses")

    def _moved(self, victims: set[int], lost_s: float) -> list[Seen]:
        """Requests that a victim may have had and that have not ended."""
        return [
            seen
            for seen in self._load.seen.values()
            if not seen.ended_s
            and seen.sent_s <= lost_s
            and (seen.owner is None or seen.owner in victims or seen.ask.n > 1)
        ]

    def _untouched(self, seen: Seen, victims: set[int], lost_s: float) -> bool:
        """Whether it streamed at the loss, from one owner ever since it was sent."""
        if seen.ask.n > 1 or seen.owner is None or seen.owner in victims or not seen.chunks_s:
            return False
        streamed = seen.chunks_s[0] <= lost_s <= (seen.ended_s or lost_s)
        # An older stream may have been moved to its present owner by the previous loss.
        return streamed and seen.sent_s > self._lost_before_s
