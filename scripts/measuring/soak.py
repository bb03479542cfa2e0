"""A service under load and kills for a long time: checks that its memory and files do not grow."""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scripts.benchmarks.results.report import mebibytes
from scripts.faults.service.process import ChaosService
from scripts.faults.trials.stage import Settings, Stage
from scripts.measuring.value import Measured, row_of

SAMPLE_S: Final = 5.0
KILL_EVERY_S: Final = 10.0
KILLS_A_MINUTE: Final = 3
"""The shortest time between kills, long enough for a killed worker to restart."""
WARM_UP: Final = 0.2
"""The first part of the time, whose samples do not count: caches and pools fill."""
WARM_UP_REQUESTS: Final = 1_000
NBYTES_A_REQUEST: Final = 512
SPARE_NBYTES: Final = 4 * 2**20
"""The variation of the allocator's memory between two samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The resources of controller and file system after a number of requests."""

    rss_nbytes: int
    fds: int
    threads: int
    socket_files: int
    processes: int
    requests: int


def sample(service: ChaosService, requests: int) -> Sample:
    held = service.footprint()
    folders = {path.parent for path in service.sockets}
    return Sample(
        rss_nbytes=held.rss_nbytes,
        fds=held.fds,
        threads=held.threads,
        socket_files=sum(len(list(folder.iterdir())) for folder in folders if folder.exists()),
        processes=len(service.alive()),
        requests=requests,
    )


def flatness(samples: Sequence[Sample]) -> list[Measured]:
    """Compare the medians of the first and the last third, after the warm-up.

    Memory may grow by a small amount per request. A leak per request exceeds it even in a short
    soak, after enough requests.
    """
    counted = samples[int(len(samples) * WARM_UP) :]
    warm = [each for each in counted if each.requests >= WARM_UP_REQUESTS]
    counted = warm or counted
    third = max(1, len(counted) // 3)
    first, last = counted[:third], counted[-third:]

    def medians(name: str) -> tuple[float, float]:
        before, after = (
            statistics.median(getattr(each, name) for each in part) for part in (first, last)
        )
        return before, after

    before, after = medians("requests")
    requests = after - before
    before, after = medians("rss_nbytes")
    text = f"RSS growth over {requests:g} requests, from {mebibytes(before)}"
    allowed = SPARE_NBYTES + NBYTES_A_REQUEST * requests
    found = [Measured.bounded(text, after - before, allowed, mebibytes)]
    for name, spare in (("fds", 4), ("threads", 0), ("socket_files", 0), ("processes", 0)):
        before, after = medians(name)
        text = f"growth of {name.replace('_', ' ')}, from {before:g}"
        found.append(Measured.bounded(text, after - before, spare, lambda value: f"{value:g}"))
    return found


class Soak:
    """The trial of a row, so that streams and leftovers are judged like any other row's."""

    def __init__(self, minutes: float) -> None:
        self._minutes: Final = minutes
        self._ends_s = 0.0
        self._deaths = 0
        self.samples: Final[list[Sample]] = []
        self.kills = 0

    async def trial(self, stage: Stage) -> None:
        """Kill a worker now and then, and take samples, until the time is up."""
        self._ends_s = time.monotonic() + 60.0 * self._minutes
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take_samples(stage))
                group.create_task(self._kill_now_and_then(stage))
        except ExceptionGroup as failed:
            # The first exception is the cause; the other task was only cancelled
            # because of it.
            raise failed.exceptions[0] from failed
        self._deaths = stage.service.deaths(0)

    async def _take_samples(self, stage: Stage) -> None:
        while time.monotonic() < self._ends_s:
            await asyncio.sleep(SAMPLE_S)
            self.samples.append(sample(stage.service, stage.result.requests))

    async def _kill_now_and_then(self, stage: Stage) -> None:
        service = stage.service
        while time.monotonic() + KILL_EVERY_S < self._ends_s:
            await asyncio.sleep(KILL_EVERY_S)
            index = stage.rng.choice(stage.workers())
            since = service.mark()
            os.kill(service.pids[index], signal.SIGKILL)
            self.kills += 1
            await service.wait_ready(index, since)

    def measured(self) -> list[Measured]:
        """Whether the faults happened, and what they left behind."""
        least = int(KILLS_A_MINUTE * self._minutes)
        unasked = abs(self._deaths - self.kills)
        return [
            *(flatness(self.samples) if self.samples else ()),
            Measured("kills", str(self.kills), f">= {least}", self.kills >= least),
            Measured.bounded("deaths without a kill, or kills without a death", unasked, 0, str),
        ]


async def measure_soak(options: argparse.Namespace) -> list[Measured]:
    """Stream from the service for this time. An exception is a violation."""
    settings = Settings(
        trials=1,
        seed=options.seed,
        model=None,
        workers=options.workers,
        streams=options.clients,
        slack=1.0,
    )
    soak = Soak(options.minutes)
    result = await Stage(row_of("soak", soak.trial), settings).run()
    print(*result.violations, sep="\n", file=sys.stderr)
    broken = len(result.violations)
    text = f"violations in {result.requests} requests"
    return [*soak.measured(), Measured.bounded(text, broken, 0, str)]
