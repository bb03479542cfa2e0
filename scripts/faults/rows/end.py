"""The end of the controller: SIGKILL or a signal to stop, while workers load and afterwards."""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from scripts.faults.service.client import Seen
from scripts.faults.service.process import ChaosService
from scripts.faults.trials.load import Load
from scripts.faults.trials.stage import QUIET_S, Row, Stage, eventually
from scripts.faults.verdicts.leftovers import (
    check_guarded,
    descendants,
    listening_port,
    socket_directories,
)

PASSES_S: Final = 0.3
"""The longest time that the service runs before the fault."""
ORPHANED_S: Final = 2.0
STARTED_S: Final = 10.0
DRAIN_S: Final = 20.0
AT_ONCE_S: Final = 1.0
CUT_IN_SILENCE: Final = "the stream ended without [DONE]"


def _loading(stage: Stage) -> tuple[str, ...]:
    """Load longer than the moment before the fault, as a real model does."""
    return () if stage.settings.model is not None else ("--fake-load-time", f"{2 * PASSES_S}")


async def _all_gone(stage: Stage, service: ChaosService) -> None:
    """Wait for the processes of a dead controller to exit, within their time limit."""

    async def gone() -> bool:
        return not service.alive() and not descendants(service)

    if not await eventually(gone, stage.settings.slack * ORPHANED_S):
        left = {*service.alive(), *descendants(service)}
        stage.result.leave("processes", len(left), left)


async def controller_killed(stage: Stage) -> None:
    """No descendant is left after 2 s, and the next start works on the same port."""
    loading = stage.rng.random() < 0.5
    # Two workers: each could keep the other's end of a pipe open.
    service = stage.new_service("--dp-size", "2", *(_loading(stage) if loading else ()))
    load: Load | None = None
    try:
        await service.start(ready=not loading)
        if loading:
            await service.wait_line("worker 0: started")
        else:
            await stage.oracle.prepare(service.client)
            load = Load(service.client, stage.oracle, stage.throwaway(), streams=2)
            load.start()
        await asyncio.sleep(stage.rng.random() * PASSES_S)
        check_guarded(stage.result, service)
        port, directories = listening_port(service.pid), socket_directories(service.pid)
        killed_s = time.monotonic()
        service.signal(signal.SIGKILL)
        await service.exited(QUIET_S)
        await _all_gone(stage, service)
        stage.result.detection_s.append(time.monotonic() - killed_s)
        if loading and any("ready at" in line.text for line in service.lines):
            stage.result.violate("it was ready before it was killed")
    finally:
        if load is not None:
            load.abandon()
        await service.stop()
    successor = stage.new_service("--dp-size", "1", port=port)
    try:
        await successor.start()
        stage.result.recovery_s.append(time.monotonic() - killed_s)
        left = [path for path in directories if path.exists()]
        stage.result.leave("files", len(left), left)
        check_guarded(stage.result, successor)
        await stage.oracle.prepare(successor.client)
        seen = await successor.client.stream(stage.oracle.draw())
        stage.result.take(seen, stage.oracle.expected(seen.ask))
        await stage.end(successor)
        await _all_gone(stage, successor)
    finally:
        await successor.stop()


async def ended_by_signal(stage: Stage) -> None:
    """One signal drains, two end at once: at the start, with open streams, with a hung worker."""
    twice = stage.rng.random() < 0.5
    when = stage.rng.choice(("loading", "streaming", "streaming", "hung"))
    loading = when == "loading"
    more = _loading(stage) if loading else ("--drain-timeout", f"{DRAIN_S:g}")
    service = stage.new_service("--dp-size", "2", *more)
    try:
        await service.start(ready=not loading)
        if loading:
            await service.wait_line("worker 0: started")
            await asyncio.sleep(stage.rng.random() * PASSES_S)
            await _signal(stage, service, twice=twice)
        else:
            await stage.oracle.prepare(service.client)
            await _end_under_load(stage, service, twice=twice, hung=when == "hung")
        await _all_gone(stage, service)
        await stage.nothing_left(service)
    finally:
        await service.stop()


async def _signal(stage: Stage, service: ChaosService, *, twice: bool) -> None:
    """Send the signal, and check the exit's time and status."""
    number = stage.rng.choice((signal.SIGTERM, signal.SIGINT))
    signalled_s = time.monotonic()
    service.signal(number)
    if twice:
        await service.wait_line("draining")
        signalled_s = time.monotonic()
        with suppress(ProcessLookupError):
            service.signal(number)
    # A signal sent after this moment breaks the trial.
    status = await service.exited(stage.settings.slack * (AT_ONCE_S if twice else DRAIN_S))
    times = stage.result.detection_s if twice else stage.result.recovery_s
    times.append(time.monotonic() - signalled_s)
    # A drain that completed before the second signal exits normally. Ctrl-C has its own status.
    orderly = 128 + number if number == signal.SIGINT else 0
    allowed = (orderly, 128 + number) if twice else (orderly,)
    if status not in allowed:
        stage.result.violate(f"exit status {status} after {number.name}, {twice=}")


async def _end_under_load(stage: Stage, service: ChaosService, *, twice: bool, hung: bool) -> None:
    streams = [
        Seen(replace(stage.oracle.draw(), by_openai=False)) for _ in range(stage.settings.streams)
    ]
    tasks = [asyncio.create_task(service.client.stream(seen.ask, seen)) for seen in streams]

    async def begun() -> bool:
        return all(seen.chunks_s or seen.ended_s for seen in streams)

    await eventually(begun, pause_s=0.005)
    open_streams = [seen for seen in streams if not seen.ended_s]
    if not open_streams:
        stage.result.violate("no stream was open when the signal came")
    if hung:
        service.order(0, "hang")
    ending = asyncio.create_task(_signal(stage, service, twice=twice))
    if not twice:
        await _refused(stage, service, open_streams)
    await asyncio.gather(ending, *tasks)
    for seen in streams:
        _judge(stage, seen, cut=twice, hung=hung and seen.owner == 0)


async def _refused(stage: Stage, service: ChaosService, streams: Sequence[Seen]) -> None:
    """New requests during a drain are refused, with the reason."""
    await service.wait_line("draining")
    seen = await service.client.stream(replace(stage.oracle.draw(), by_openai=False))
    if seen.status == 503 and seen.retry_after:
        stage.result.refused += 1
    elif seen.status or not all(each.ended_s for each in streams):
        stage.result.violate(f"asked while it drained: {seen.status} {seen.error}")


def _judge(stage: Stage, seen: Seen, *, cut: bool, hung: bool) -> None:
    """A stream completes. If it is ``cut`` or its worker hung, it may fail, with an error event."""
    if not seen.error or not (cut or hung):
        stage.result.take(seen, stage.oracle.expected(seen.ask))
    elif seen.error == CUT_IN_SILENCE or not (cut or seen.done == 1):
        stage.result.violate(f"{seen.ask}: ended with {seen.done} [DONE] and {seen.error!r}")


END_ROWS: Final = (
    Row(
        name="F12",
        title="controller SIGKILL",
        trial=controller_killed,
        fresh=True,
        bounds_s=(ORPHANED_S, STARTED_S),
    ),
    Row(
        name="F14",
        title="SIGTERM, SIGINT, once and twice",
        trial=ended_by_signal,
        fresh=True,
        lengths=(80, 140),
    ),
)
