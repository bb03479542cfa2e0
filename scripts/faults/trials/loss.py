"""Harming a worker, and measuring its loss and recovery."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from scripts.faults.service.client import Ask, Seen
from scripts.faults.service.process import EVENT_TIMEOUT_S, Line, ServiceError
from scripts.faults.trials.stage import Stage, eventually

DETECTION_S: Final = 0.1
RECOVERY_S: Final = 1.0
DRAWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """When a worker was harmed, its loss in the log, and when its successor was ready.

    ``resumed``: how many of its streams resumed; the others already had their last token.
    """

    harmed_s: float
    lost: Line
    ready_s: float
    resumed: int


async def lose(
    stage: Stage, index: int, harm: Callable[[], None], meanwhile: Callable[[], None] | None = None
) -> Loss:
    """Harm one worker; wait until its loss is detected and repaired and its streams have ended."""
    service = stage.service
    streams = stage.load.streaming((index,))
    since = service.mark()
    harmed_s = time.monotonic()
    harm()
    lost = await service.wait_lost(index, since)
    stage.result.detection_s.append(lost.time_s - harmed_s)
    if meanwhile is not None:
        meanwhile()
    ready = await service.wait_ready(index, since)
    await all_ended(stage, streams)
    found = [seen.resumed_s(harmed_s, lost.time_s) for seen in streams]
    resumed = [time_s - harmed_s for time_s in found if time_s is not None]
    stage.result.recovery_s += resumed
    lost_alone(stage, since)
    return Loss(harmed_s=harmed_s, lost=lost, ready_s=ready.time_s, resumed=len(resumed))


def lost_alone(stage: Stage, since: int) -> None:
    """Record a violation if other workers were lost with the harmed one."""
    if (deaths := stage.service.deaths(since)) != 1:
        stage.result.violate(f"{deaths} workers were lost in place of one")


async def all_ended(stage: Stage, streams: list[Seen]) -> None:
    if not await stage.load.wait_for(
        lambda: all(each.ended_s for each in streams), EVENT_TIMEOUT_S
    ):
        stage.result.violate(f"a stream never ended: {[each.ask for each in streams]}")


async def victim(stage: Stage) -> int:
    """Wait for a random token of a random stream, and return its owner."""
    least = stage.rng.randint(1, stage.row.lengths[0])
    found: list[Seen] = []

    def streaming() -> bool:
        found[:] = [
            seen for seen in stage.load.streaming(stage.workers()) if len(seen.chunks_s) >= least
        ]
        return bool(found)

    if not await stage.load.wait_for(streaming, EVENT_TIMEOUT_S):
        raise ServiceError("no stream to harm")
    owner = stage.rng.choice(found).owner
    assert owner is not None
    return owner


def by_length(stage: Stage) -> list[Ask]:
    """Some requests, from the shortest response to the longest."""
    return sorted((stage.oracle.draw() for _ in range(DRAWN)), key=lambda ask: ask.max_tokens)


def kill(stage: Stage, index: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(stage.service.pids[index], number)


async def carry_out(stage: Stage, index: int, words: str) -> None:
    """Send an order to a worker that survives it, and wait until it is carried out."""
    service = stage.service
    file = service.orders / str(service.pids[index])
    service.order(index, words)
    if not await stage.load.wait_for(lambda: not file.exists(), EVENT_TIMEOUT_S):
        raise ServiceError(f"worker {index} never did {words!r}")


def died_s(stage: Stage, pid: int) -> float:
    """The time at which a worker died by its order."""
    return float((stage.service.orders / f"{pid}.died").read_text())


async def all_ready(stage: Stage) -> None:
    """Wait until all workers are ready."""

    async def settled() -> bool:
        owners = (await stage.service.get("/server_info"))["owners"]
        return all(owner["status"] == "ready" for owner in owners)

    if not await eventually(settled, EVENT_TIMEOUT_S):
        stage.result.violate("not all workers became ready")


def total(counters: dict[str, int], name: str) -> int:
    """The sum of a counter over all of its labels."""
    return sum(value for key, value in counters.items() if key.partition("{")[0] == name)
