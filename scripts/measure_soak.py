"""A service under load and under kills for a long time: whether what it holds stays flat."""

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

from bench_report import mebibytes
from chaos_service import ChaosService
from chaos_stage import Row, Settings, Stage
from measure_value import Measured

SAMPLE_S: Final = 5.0
KILL_EVERY_S: Final = 10.0
WARM_UP: Final = 0.2
"""The part of the time whose samples do not count: caches and pools fill."""
RSS_GROWTH: Final = 0.1
LEAST_GROWTH_NBYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What controller and file system hold at one moment."""

    rss_nbytes: int
    fds: int
    threads: int
    socket_files: int
    processes: int


def sample(service: ChaosService) -> Sample:
    held = service.footprint()
    folders = {path.parent for path in service.sockets}
    return Sample(
        rss_nbytes=held.rss_nbytes,
        fds=held.fds,
        threads=held.threads,
        socket_files=sum(len(list(folder.iterdir())) for folder in folders if folder.exists()),
        processes=len(service.alive()),
    )


def flatness(samples: Sequence[Sample]) -> list[Measured]:
    """Compare the medians of the first and the last third, after the warm-up."""
    counted = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(counted) // 3)
    first, last = counted[:third], counted[-third:]

    def medians(name: str) -> tuple[float, float]:
        before, after = (
            statistics.median(getattr(each, name) for each in part) for part in (first, last)
        )
        return before, after

    before, after = medians("rss_nbytes")
    allowed = max(RSS_GROWTH * before, LEAST_GROWTH_NBYTES)
    text = f"RSS growth, from {mebibytes(before)}"
    found = [Measured.bounded(text, after - before, allowed, mebibytes)]
    for name, spare in (("fds", 4), ("threads", 0), ("socket_files", 0), ("processes", 0)):
        before, after = medians(name)
        text = f"growth of {name.replace('_', ' ')}, from {before:g}"
        found.append(Measured.bounded(text, after - before, spare, lambda value: f"{value:g}"))
    return found


async def measure_soak(options: argparse.Namespace) -> list[Measured]:
    """Stream from the service for the time, kill a worker now and then, and take samples."""
    settings = Settings(
        trials=1,
        seed=options.seed,
        model=None,
        workers=options.workers,
        streams=options.clients,
        slack=1.0,
    )
    stage = Stage(Row(name="soak", title="", trial=_nothing), settings)
    service = stage.new_service()
    samples: list[Sample] = []
    try:
        await service.start()
        load = stage.new_load(service)
        load.start()
        ends_s = time.monotonic() + 60.0 * options.minutes
        kills = asyncio.create_task(_kill_now_and_then(stage, service))
        while time.monotonic() < ends_s:
            await asyncio.sleep(SAMPLE_S)
            samples.append(sample(service))
        kills.cancel()
        await load.stop()
        await stage.end(service)
        deaths = service.deaths(0)
    finally:
        await service.stop()
    print(*stage.result.violations, sep="\n", file=sys.stderr)
    text = f"violations, {stage.result.requests} requests and {deaths} deaths"
    broken = len(stage.result.violations)
    return [*flatness(samples), Measured.bounded(text, broken, 0, str)]


async def _nothing(_stage: Stage) -> None:
    """This measure has no trials."""


async def _kill_now_and_then(stage: Stage, service: ChaosService) -> None:
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        index = stage.rng.choice(stage.workers())
        since = service.mark()
        os.kill(service.pids[index], signal.SIGKILL)
        await service.wait_ready(index, since)
