"""Faults of the whole service: crash loop, all workers dead, stopped controller, two instances."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import psutil

from scripts.faults.rows.end import PASSES_S
from scripts.faults.service.process import ChaosService
from scripts.faults.trials.load import Load
from scripts.faults.trials.stage import HANG_S, QUIET_S, Row, Stage
from scripts.faults.verdicts.leftovers import (
    check_guarded,
    is_guarded,
    listening_port,
    planted,
    socket_directories,
)

CRASH_STATUS: Final = 1
BOOT_ERROR_STATUS: Final = 3
MAX_RESTARTS: Final = 2
GIVEN_UP_S: Final = 5.0
CONTROLLER_STOP_S: Final = 2.0 * HANG_S
WOKEN_S: Final = 2.0
DETECTION_S: Final = 0.1
RECOVERY_S: Final = 3.0
RESTART_S: Final = 1.0
"""Extra time for a start on a port that was in use a moment ago."""


@asynccontextmanager
async def loaded(
    stage: Stage, *more: str, streams: int
) -> AsyncIterator[tuple[ChaosService, Load]]:
    """Start a service for this trial, with clients at random points of their requests."""
    service = stage.new_service(*more)
    load: Load | None = None
    try:
        await service.start()
        await stage.oracle.prepare(service.client)
        load = Load(service.client, stage.oracle, stage.result, streams=streams)
        load.start()
        await asyncio.sleep(stage.rng.random() * PASSES_S)
        yield service, load
    finally:
        if load is not None:
            await load.stop()
        await service.stop()


async def crash_loop(stage: Stage) -> None:
    """One worker dies at each start: it is given up within its budget, and the other serves."""
    status = stage.rng.choice((CRASH_STATUS, BOOT_ERROR_STATUS))
    more = ("--dp-size", "2", "--max-restarts", f"{MAX_RESTARTS}")
    async with loaded(stage, *more, streams=3) as (service, load):
        (service.orders / "boot-0").write_text(str(status))
        since = service.mark()
        harmed_s = time.monotonic()
        os.kill(service.pids[0], signal.SIGKILL)
        gave_up = await service.wait_line(r"worker 0: failed for good", since=since)
        stage.result.recovery_s.append(gave_up.time_s - harmed_s)
        starts = sum("worker 0: started" in line.text for line in service.lines[since:])
        # A start that would fail again, unlike a crash, is not repeated.
        expected = MAX_RESTARTS if status == CRASH_STATUS else 1
        if starts != expected:
            stage.result.violate(f"{starts} starts for status {status} in place of {expected}")
        await _others_serve(stage, service)
        await load.stop()
        await _cause_is_shown(stage, service, status)
        await stage.end(service)


async def _others_serve(stage: Stage, service: ChaosService) -> None:
    """Send requests to the remaining worker, by its rank."""
    seen = await service.client.stream(replace(stage.oracle.draw(), rank=1))
    stage.result.take(seen, stage.oracle.expected(seen.ask))


async def _cause_is_shown(stage: Stage, service: ChaosService, status: int) -> None:
    """A service with fewer workers than requested reports that, and the cause."""
    health = await service.client.http.get("/health")
    health_body = health.json()
    if (health.status_code, health_body["status"], health_body["owners"]["0"]) != (
        200,
        "degraded",
        "failed",
    ):
        stage.result.violate(f"health returned {health.status_code} {health.text}")
    # The last loss is the cause, not the SIGKILL before it.
    last = f"status {status}"
    cause = (await service.get("/workers"))["workers"][0]["last_cause"] or ""
    if last not in cause:
        stage.result.violate(f"the cause is {cause!r}, without {last!r}")


async def all_dead(stage: Stage) -> None:
    """Streams wait and resume; new requests get Retry-After; the service recovers by itself."""
    service, load = stage.service, stage.load
    await load.wait_for(lambda: bool(load.streaming(stage.workers())), QUIET_S)
    streams = load.streaming(stage.workers())
    since = service.mark()
    load.refusals_allowed = True
    harmed_s = time.monotonic()
    for index in stage.workers():
        os.kill(service.pids[index], signal.SIGKILL)
    for index in stage.workers():
        lost = await service.wait_lost(index, since)
        stage.result.detection_s.append(lost.time_s - harmed_s)
    await _told_to_come_back(stage, index, since)
    for index in stage.workers():
        await service.wait_ready(index, since)
    await load.wait_for(lambda: all(each.ended_s for each in streams), QUIET_S)
    resumed = [each.resumed_s(harmed_s, lost.time_s) for each in streams]
    stage.result.recovery_s += [time_s - harmed_s for time_s in resumed if time_s is not None]
    if (deaths := service.deaths(since)) != len(stage.workers()):
        stage.result.violate(f"{deaths} deaths of {len(stage.workers())} workers")
    # Clients that were refused a moment ago may still wait to retry.
    await asyncio.sleep(0.1)
    load.refusals_allowed = False


async def _told_to_come_back(stage: Stage, index: int, since: int) -> None:
    """Send a request pinned to a dead worker: it may be served only after the restart."""
    service = stage.service
    ask = replace(stage.oracle.draw(), max_tokens=1, rank=index, by_openai=False)
    seen = await service.client.stream(ask)
    if seen.status == 503 and seen.retry_after:
        stage.result.refused += 1
        return
    ready = await service.wait_ready(index, since)
    if ready.time_s > seen.ended_s:
        stage.result.violate(f"{ask}: status {seen.status} while every worker was dead")


async def controller_stopped(stage: Stage) -> None:
    """A controller that was stopped kills no worker when it continues."""
    service, load = stage.service, stage.load
    await load.wait_for(lambda: bool(load.streaming(stage.workers())), QUIET_S)
    since = service.mark()
    await asyncio.sleep(stage.rng.random() * PASSES_S)
    os.kill(service.pid, signal.SIGSTOP)
    await asyncio.sleep(CONTROLLER_STOP_S)
    if (status := psutil.Process(service.pid).status()) != psutil.STATUS_STOPPED:
        stage.result.violate(f"the controller did not sleep: {status}")
    streams = [seen for seen in load.seen.values() if not seen.ended_s]
    woken_s = time.monotonic()
    os.kill(service.pid, signal.SIGCONT)
    if not await load.wait_for(lambda: all(seen.ended_s for seen in streams), QUIET_S):
        stage.result.violate(f"a stream never ended: {[seen.ask for seen in streams]}")
    stage.result.recovery_s.append(time.monotonic() - woken_s)
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were killed although the controller slept")


async def started_twice(stage: Stage) -> None:
    """A second instance on the port, or a quick restart, after a controller was killed."""
    with planted() as (stale, held):
        began_s = time.monotonic()
        async with loaded(stage, "--dp-size", "1", streams=2) as (service, load):
            boot_s = time.monotonic() - began_s
            stage.result.leave("files", int(stale.exists()), stale)
            if not is_guarded(held):
                stage.result.violate("the directory of another service was harmed")
            port = listening_port(service.pid)
            if stage.result.trials % 2 == 0:
                await _second_is_refused(stage, service, port)
                await load.stop()
                await stage.end(service)
                return
            await load.stop()
            await stage.end(service)
        await _starts_again(stage, port, boot_s)


async def _second_is_refused(stage: Stage, service: ChaosService, port: int) -> None:
    """A port in use is reported in one sentence, and the first instance is not harmed."""
    since, directories = service.mark(), socket_directories(service.pid)
    second = stage.new_service("--dp-size", "1", port=port)
    began_s = time.monotonic()
    try:
        await second.start(ready=False)
        status = await second.exited(QUIET_S)
        stage.result.detection_s.append(time.monotonic() - began_s)
        if status != 2 or len(second.lines) != 1 or "in use" not in second.lines[0].text:
            stage.result.violate(f"status {status}: {second.last_words()}")
    finally:
        await second.stop()
    seen = await service.client.stream(stage.oracle.draw())
    stage.result.take(seen, stage.oracle.expected(seen.ask))
    if service.deaths(since) or socket_directories(service.pid) != directories:
        stage.result.violate("the second instance harmed the first")
    check_guarded(stage.result, service)


async def _starts_again(stage: Stage, port: int, boot_s: float) -> None:
    began_s = time.monotonic()
    again = stage.new_service("--dp-size", "1", port=port)
    try:
        await again.start()
        stage.result.recovery_s.append(max(0.0, time.monotonic() - began_s - boot_s))
        check_guarded(stage.result, again)
        seen = await again.client.stream(stage.oracle.draw())
        stage.result.take(seen, stage.oracle.expected(seen.ask))
        await stage.end(again)
    finally:
        await again.stop()


SERVICE_ROWS: Final = (
    Row(
        name="F10",
        title="crash loop",
        trial=crash_loop,
        fresh=True,
        bounds_s=(float("inf"), GIVEN_UP_S),
    ),
    Row(
        name="F11",
        title="all workers dead",
        trial=all_dead,
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F13",
        title="controller stopped",
        trial=controller_stopped,
        bounds_s=(float("inf"), WOKEN_S),
    ),
    Row(
        name="F22",
        title="second instance; restart (time beyond boot)",
        trial=started_twice,
        fresh=True,
        bounds_s=(float("inf"), RESTART_S),
    ),
)
