"""Faults of single workers: killed, stopped, hung, slow, poisoned."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from chaos_client import Ask, Seen
from chaos_service import EVENT_TIMEOUT_S, POISON_SEED
from chaos_stage import HANG_S, HANG_SEEN_S, Row, Stage, eventually

DETECTION_S: Final = 0.1
RECOVERY_S: Final = 1.0
DEATHS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL)
SLOW_FACTOR: Final = 20
SLOW_S: Final = 2.0


async def lose(
    stage: Stage, index: int, harm: Callable[[], None], meanwhile: Callable[[], None] | None = None
) -> None:
    """Harm one worker, and wait until its loss is seen, mended, and its streams have ended."""
    service = stage.service
    streams = stage.load.streaming((index,))
    since = service.mark()
    harmed_s = time.monotonic()
    harm()
    lost = await service.wait_lost(index, since)
    stage.result.detection_s.append(lost.time_s - harmed_s)
    if meanwhile is not None:
        meanwhile()
    await service.wait_ready(index, since)
    await _all_ended(stage, streams)
    for seen in streams:
        resumed_s = seen.resumed_s(harmed_s, lost.time_s)
        if resumed_s is not None:
            stage.result.recovery_s.append(resumed_s - harmed_s)
    if (deaths := service.deaths(since)) != 1:
        stage.result.violate(f"{deaths} workers were lost in place of one")


async def _all_ended(stage: Stage, streams: list[Seen]) -> None:
    if not await stage.load.wait_for(
        lambda: all(each.ended_s for each in streams), EVENT_TIMEOUT_S
    ):
        stage.result.violate(f"a stream never ended: {[each.ask for each in streams]}")


async def _victim(stage: Stage) -> int:
    """Wait for a random token of a random stream, and return its owner."""
    least = stage.rng.randint(1, stage.row.lengths[0])
    found: list[Seen] = []

    def streaming() -> bool:
        found[:] = [
            seen for seen in stage.load.streaming(stage.workers()) if len(seen.chunks_s) >= least
        ]
        return bool(found)

    if not await stage.load.wait_for(streaming, EVENT_TIMEOUT_S):
        return stage.rng.choice(stage.workers())
    owner = stage.rng.choice(found).owner
    assert owner is not None
    return owner


def _kill(stage: Stage, index: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(stage.service.pids[index], number)


async def idle_kill(stage: Stage) -> None:
    index = stage.rng.choice(stage.workers())
    await lose(stage, index, lambda: _kill(stage, index))
    seen = await stage.service.client.stream(stage.oracle.draw())
    stage.result.take(seen, stage.oracle.expected(seen.ask))


async def streaming_kill(stage: Stage) -> None:
    index = await _victim(stage)
    await lose(stage, index, lambda: _kill(stage, index))


async def kill_at_a_message(stage: Stage) -> None:
    """Die in a prefill, right after Accepted, or between the last token and Finished."""
    index = await _victim(stage)
    match stage.rng.choice(("prefill", "die-after accepted", "die-before finished")):
        case "prefill":
            await asyncio.sleep(stage.rng.random() * 0.05)
            await lose(stage, index, lambda: _kill(stage, index))
        case order:
            since = stage.service.mark()
            stage.service.order(index, order)
            # The order waits for the next such message, so that nothing can be said of times.
            await stage.service.wait_lost(index, since)
            await stage.service.wait_ready(index, since)


async def other_deaths(stage: Stage) -> None:
    index = await _victim(stage)
    death = stage.rng.choice((*DEATHS, "exit 0", "exit 1"))
    if isinstance(death, str):
        await lose(stage, index, lambda: stage.service.order(index, death))
    else:
        await lose(stage, index, lambda: _kill(stage, index, death))


async def stopped(stage: Stage) -> None:
    """SIGSTOP; in half of the trials it wakes up after it was given up."""
    index = await _victim(stage)
    pid = stage.service.pids[index]

    def wake() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    wakes = stage.rng.random() < 0.5
    await lose(stage, index, lambda: _kill(stage, index, signal.SIGSTOP), wake if wakes else None)


async def hung(stage: Stage) -> None:
    index = await _victim(stage)
    since = stage.service.mark()
    await lose(stage, index, lambda: stage.service.order(index, "hang"))
    # The first rung of the ladder is that it shows where it hangs.
    await stage.service.wait_line(rf"worker {index}: .*_hang", 5.0, since=since)


async def slow(stage: Stage) -> None:
    """20 times slower for a while: nobody is killed, and nothing is lost."""
    service = stage.service
    index = await _victim(stage)
    since = service.mark()
    service.order(index, f"slow {SLOW_FACTOR}")
    await asyncio.sleep(SLOW_S)
    service.order(index, "slow 1")
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were killed for being slow")
    await _all_ended(stage, stage.load.streaming(stage.workers()))


async def out_of_memory(stage: Stage) -> None:
    index = await _victim(stage)
    await lose(stage, index, lambda: stage.service.order(index, "fill-memory"))


async def poison(stage: Stage) -> None:
    """A request that kills whoever runs it ends after two deaths, and takes no other with it."""
    service = stage.service
    since = service.mark()
    seen = await service.client.stream(Ask(prompt="poison", temperature=1.0, seed=POISON_SEED))
    if seen.code not in ("request_crashed_worker", "worker_lost"):
        stage.result.violate(f"poison ended with {seen.status} {seen.code} {seen.error}")

    async def settled() -> bool:
        owners = (await service.get("/server_info"))["owners"]
        return all(owner["status"] == "ready" for owner in owners)

    if not await eventually(settled, EVENT_TIMEOUT_S):
        stage.result.violate("the workers did not come back")
    if not 1 <= (deaths := service.deaths(since)) <= 2:
        stage.result.violate(f"{deaths} workers died of one request")


WORKER_ROWS: Final = (
    Row(
        name="F1",
        title="SIGKILL, idle",
        trial=idle_kill,
        load=False,
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F2",
        title="SIGKILL, streaming",
        trial=streaming_kill,
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F3",
        title="SIGKILL in prefill, after Accepted, before Finished",
        trial=kill_at_a_message,
        arguments=("--fake-prefill-rate", "2000"),
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F4",
        title="SIGSEGV, SIGABRT, exit 0 and 1",
        trial=other_deaths,
        bounds_s=(DETECTION_S, RECOVERY_S),
    ),
    Row(
        name="F5",
        title="SIGSTOP, SIGCONT",
        trial=stopped,
        bounds_s=(HANG_SEEN_S, HANG_SEEN_S + RECOVERY_S),
    ),
    Row(
        name="F6",
        title="decode loop hangs",
        trial=hung,
        bounds_s=(HANG_SEEN_S, HANG_SEEN_S + RECOVERY_S),
    ),
    # A second is a short time for 50 ms of work at that speed, on a machine with other work.
    Row(name="F7", title="20 times slower", trial=slow, hang_s=3.0),
    Row(
        name="F8",
        title="out of memory",
        trial=out_of_memory,
        bounds_s=(HANG_S, HANG_S + RECOVERY_S),
    ),
    Row(name="F9", title="poison request", trial=poison, orders=("poison",)),
)
