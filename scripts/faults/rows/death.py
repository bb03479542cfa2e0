"""Deaths of single workers: killed, exited, out of memory, killed by a poison request."""

import asyncio
import re
import signal
from dataclasses import replace
from functools import partial
from typing import Final

from scripts.faults.service.client import Ask, Seen
from scripts.faults.service.process import EVENT_TIMEOUT_S, POISON_SEED, ChaosService
from scripts.faults.trials.loss import (
    DETECTION_S,
    RECOVERY_S,
    all_ready,
    by_length,
    carry_out,
    kill,
    lose,
    total,
    victim,
)
from scripts.faults.trials.stage import HANG_S, Row, Stage

DEATHS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL)
POISON_DEATHS: Final = 2
REPLACED_S: Final = 0.5
"""Time for replacing a worker, on top of its start."""
KILLS: Final = 5
CROWD: Final = 2
LOOKS: Final = 5
LOOKS_S: Final = 0.05


async def idle_kill(stage: Stage) -> None:
    """An idle worker is replaced, and clients notice nothing."""
    service = stage.service
    index = stage.rng.choice(stage.workers())
    seen, loss = await asyncio.gather(
        service.client.stream(stage.oracle.draw()), lose(stage, index, lambda: kill(stage, index))
    )
    stage.result.take(seen, stage.oracle.expected(seen.ask))
    stage.result.recovery_s.append(loss.ready_s - loss.harmed_s)
    if stage.result.trials == stage.settings.trials:
        allowed_s = stage.settings.slack * (_first_boot_s(service) + REPLACED_S)
        stage.result.bound("replacement", stage.result.recovery_s, allowed_s)


def _first_boot_s(service: ChaosService) -> float:
    """How long the first worker took to start, while all others were starting too."""
    started, ready = (
        next(line.time_s for line in service.lines if re.search(rf"worker 0: {word}\b", line.text))
        for word in ("started", "ready")
    )
    return ready - started


async def streaming_kill(stage: Stage) -> None:
    """Kill a worker under its streams, until a stream was hit before its last token.

    On a busy machine the last tokens of a stream may be in flight while its client still sees
    it as running.
    """
    for _ in range(KILLS):
        index = await victim(stage)
        loss = await lose(stage, index, partial(kill, stage, index))
        if loss.resumed:
            return
    stage.result.violate(f"no stream resumed after {KILLS} kills")


async def other_deaths(stage: Stage) -> None:
    index = await victim(stage)
    death = stage.rng.choice((*DEATHS, "exit 0", "exit 1"))
    if isinstance(death, str):
        await lose(stage, index, lambda: stage.service.order(index, death))
    else:
        await lose(stage, index, lambda: kill(stage, index, death))


async def out_of_memory(stage: Stage) -> None:
    """A worker short of memory gets fewer requests; an exhausted one reports why it died."""
    service = stage.service
    index = await victim(stage)
    crowd = [Seen(replace(by_length(stage)[-1], rank=index)) for _ in range(CROWD)]
    asked = asyncio.gather(*(service.client.stream(seen.ask, seen) for seen in crowd))
    await stage.load.wait_for(lambda: all(seen.chunks_s for seen in crowd), EVENT_TIMEOUT_S)
    await _run_short(stage, index)
    loss = await lose(stage, index, lambda: service.order(index, "fill-memory"))
    await asked
    if "MemoryError" not in loss.lost.text:
        stage.result.violate(f"not lost for lack of memory: {loss.lost.text}")
    for seen in crowd:
        stage.result.take(seen, stage.oracle.expected(replace(seen.ask, rank=None)))


async def _run_short(stage: Stage, index: int) -> None:
    """Leave memory for one request only; its other requests are served by other workers."""
    before = total(await stage.service.counters(), "owner_preemptions_total")
    await carry_out(stage, index, "lack-memory")
    held = []
    for _ in range(LOOKS):
        await asyncio.sleep(LOOKS_S)
        loads = (await stage.service.get("/v1/loads"))["loads"]
        held.append(loads[index]["num_running_reqs"])
    if total(await stage.service.counters(), "owner_preemptions_total") == before:
        stage.result.violate("it gave back no request")
    # A request that was just offered may be among them.
    if sorted(held)[LOOKS // 2] > 1:
        stage.result.violate(f"worker {index} holds {held} requests without memory for them")


async def poison(stage: Stage) -> None:
    """A poison request is failed after two worker deaths, and no other request is failed."""
    service = stage.service
    since = service.mark()
    seen = await service.client.stream(Ask(prompt="poison", temperature=1.0, seed=POISON_SEED))
    if seen.code != "request_crashed_worker":
        stage.result.violate(f"poison ended with {seen.status} {seen.code} {seen.error}")
    await all_ready(stage)
    if (deaths := service.deaths(since)) != POISON_DEATHS:
        stage.result.violate(f"{deaths} workers died from one request")


DEATH_ROWS: Final = (
    Row(
        name="F1",
        title="SIGKILL, idle",
        trial=idle_kill,
        load=False,
        bounds_s=(DETECTION_S, float("inf")),
    ),
    Row(
        name="F2",
        title="SIGKILL, streaming",
        trial=streaming_kill,
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F4",
        title="SIGSEGV, SIGABRT, exit 0 and 1",
        trial=other_deaths,
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F8",
        title="out of memory",
        trial=out_of_memory,
        bounds_s=(HANG_S, HANG_S + RECOVERY_S),
    ),
    Row(name="F9", title="poison request", trial=poison, orders=("poison",)),
)
