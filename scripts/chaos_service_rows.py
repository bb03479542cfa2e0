"""Faults of the whole service: crash loops, all workers dead, and the controller's own ends."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from chaos_client import Seen
from chaos_load import Load
from chaos_service import ChaosService
from chaos_stage import HANG_S, QUIET_S, Row, Stage, eventually

PASSES_S: Final = 0.3
"""How long clients ask before a fault, at most."""
CRASH_STATUS: Final = 1
BOOT_ERROR_STATUS: Final = 3
CONTROLLER_STOP_S: Final = 3.0 * HANG_S


@asynccontextmanager
async def loaded(
    stage: Stage, *more: str, port: int = 0
) -> AsyncIterator[tuple[ChaosService, Load]]:
    """A service of the trial's own, with clients at a random point of their requests."""
    service = stage.new_service(*more, port=port)
    load: Load | None = None
    try:
        await service.start()
        await stage.oracle.prepare(service.client)
        load = stage.new_load(service)
        load.start()
        await asyncio.sleep(stage.rng.random() * PASSES_S)
        yield service, load
    finally:
        if load is not None:
            await load.stop()
        await service.stop()


async def crash_loop(stage: Stage) -> None:
    """One worker dies at each start: it is given up within its budget, and the others serve."""
    status = stage.rng.choice((CRASH_STATUS, BOOT_ERROR_STATUS))
    async with loaded(stage, "--max-restarts", "2") as (service, load):
        (service.orders / "boot-0").write_text(str(status))
        since = service.mark()
        harmed_s = time.monotonic()
        os.kill(service.pids[0], signal.SIGKILL)
        gave_up = await service.wait_line(r"worker 0: failed for good", since=since)
        stage.result.recovery_s.append(gave_up.time_s - harmed_s)
        starts = sum("worker 0: started" in line.text for line in service.lines[since:])
        # Told from a crash, a start that would fail again is not repeated.
        most = 2 if status == CRASH_STATUS else 1
        if starts > most:
            stage.result.violate(f"{starts} starts for status {status}, at most {most} allowed")
        await load.stop()
        health = await service.client.http.get("/health")
        if health.status_code != 200 or health.json()["owners"].get("0") != "failed":
            stage.result.violate(f"health says {health.status_code} {health.text}")
        await stage.end(service)


async def all_dead(stage: Stage) -> None:
    """Streams wait and go on; new requests are told when to come back; all recovers unaided."""
    service, load = stage.service, stage.load
    streams = load.streaming(stage.workers())
    since = service.mark()
    load.refusals_allowed = True
    harmed_s = time.monotonic()
    for index in stage.workers():
        os.kill(service.pids[index], signal.SIGKILL)
    for index in stage.workers():
        lost = await service.wait_lost(index, since)
        stage.result.detection_s.append(lost.time_s - harmed_s)
    for index in stage.workers():
        ready = await service.wait_ready(index, since)
    await load.wait_for(lambda: all(each.ended_s for each in streams), QUIET_S)
    resumed = [each.resumed_s(harmed_s, lost.time_s) for each in streams]
    stage.result.recovery_s += [time_s - harmed_s for time_s in resumed if time_s is not None]
    assert ready.time_s > harmed_s, (ready, harmed_s)
    # Those that were refused a moment ago may still be on their way back.
    await asyncio.sleep(0.1)
    load.refusals_allowed = False


async def controller_killed(stage: Stage) -> None:
    """No descendant after 2 s, and the next start works on the same port."""
    service = stage.new_service()
    load: Load | None = None
    try:
        await service.start()
        port = int(str(service.client.http.base_url.port))
        load = Load(service.client, stage.oracle, stage.throwaway(), streams=2)
        await stage.oracle.prepare(service.client)
        load.start()
        await asyncio.sleep(stage.rng.random() * PASSES_S)
        killed_s = time.monotonic()
        service.signal(signal.SIGKILL)
        await service.exited(QUIET_S)

        async def orphaned() -> bool:
            return not service.alive()

        await eventually(orphaned, 2.0)
        stage.result.detection_s.append(time.monotonic() - killed_s)
        stage.result.leave("processes", len(service.alive()), service.alive())
    finally:
        if load is not None:
            load.abandon()
        await service.stop()
    successor = stage.new_service(port=port)
    try:
        await successor.start()
        stage.result.recovery_s.append(time.monotonic() - killed_s)
        left = [path for path in service.sockets if path.exists()]
        stage.result.leave("files", len(left), left)
        seen = await successor.client.stream(stage.oracle.draw())
        stage.result.take(seen, stage.oracle.expected(seen.ask))
        await stage.end(successor)
    finally:
        await successor.stop()


async def controller_stopped(stage: Stage) -> None:
    """A controller that slept kills nobody when it wakes."""
    service = stage.service
    since = service.mark()
    await asyncio.sleep(stage.rng.random() * PASSES_S)
    os.kill(service.pid, signal.SIGSTOP)
    await asyncio.sleep(CONTROLLER_STOP_S)
    woken_s = time.monotonic()
    os.kill(service.pid, signal.SIGCONT)
    streams = [seen for seen in stage.load.seen.values() if not seen.ended_s]
    await stage.load.wait_for(lambda: all(seen.ended_s for seen in streams), QUIET_S)
    stage.result.recovery_s.append(time.monotonic() - woken_s)
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were killed although the controller slept")


async def ended_by_signal(stage: Stage) -> None:
    """Once: a drain. Twice: an end at once. With open streams, and with a worker that hangs."""
    number = stage.rng.choice((signal.SIGTERM, signal.SIGINT))
    twice, hung = stage.rng.random() < 0.5, stage.rng.random() < 0.25
    service = stage.new_service("--drain-timeout", "5")
    try:
        await service.start()
        await stage.oracle.prepare(service.client)
        streams = [Seen(stage.oracle.draw()) for _ in range(stage.settings.streams)]
        tasks = [asyncio.create_task(service.client.stream(seen.ask, seen)) for seen in streams]
        await asyncio.sleep(stage.rng.random() * PASSES_S)
        begun = [seen for seen in streams if seen.chunks_s]
        if hung:
            service.order(0, "hang")
        signalled_s = time.monotonic()
        service.signal(number)
        if twice:
            await service.wait_line("draining")
            with suppress(ProcessLookupError):
                service.signal(number)
        status = await service.exited(1.0 if twice else 15.0)
        stage.result.recovery_s.append(time.monotonic() - signalled_s)
        # A drain that was over before the second signal is an orderly end.
        allowed = (0, 128 + number) if twice else (0,)
        if status not in allowed:
            stage.result.violate(f"exit status {status} after {number.name}, {twice=}, {hung=}")
        await asyncio.gather(*tasks)
        if not twice and not hung:
            for seen in begun:
                stage.result.take(seen, stage.oracle.expected(seen.ask))
        await stage.nothing_left(service)
    finally:
        await service.stop()


async def second_instance(stage: Stage) -> None:
    """A port in use is one sentence, and harms nobody; a restart works at once."""
    async with loaded(stage) as (service, _):
        port = int(str(service.client.http.base_url.port))
        second = stage.new_service(port=port)
        try:
            await second.start(ready=False)
            status = await second.exited(QUIET_S)
            if status != 2 or len(second.lines) != 1 or "in use" not in second.lines[0].text:
                stage.result.violate(f"status {status}: {second.last_words()}")
        finally:
            await second.stop()
    began_s = time.monotonic()
    again = stage.new_service(port=port)
    try:
        await again.start()
        stage.result.recovery_s.append(time.monotonic() - began_s)
        left = [path for path in service.sockets if path.exists()]
        stage.result.leave("files", len(left), left)
        await stage.end(again)
    finally:
        await again.stop()


SERVICE_ROWS: Final = (
    Row(name="F10", title="crash loop", trial=crash_loop, fresh=True),
    Row(
        name="F11",
        title="all workers dead",
        trial=all_dead,
        bounds_s=(0.1, float("inf")),
    ),
    Row(
        name="F12",
        title="controller SIGKILL",
        trial=controller_killed,
        fresh=True,
        bounds_s=(2.0, float("inf")),
    ),
    Row(name="F13", title="controller stopped", trial=controller_stopped),
    Row(name="F14", title="SIGTERM, SIGINT, once and twice", trial=ended_by_signal, fresh=True),
    Row(name="F22", title="second instance, quick restart", trial=second_instance, fresh=True),
)
