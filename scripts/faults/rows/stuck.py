"""Workers that are alive but do not progress: stopped, hung, or only very slow."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from scripts.faults.service.client import Seen
from scripts.faults.trials.loss import (
    RECOVERY_S,
    Loss,
    all_ended,
    by_length,
    carry_out,
    kill,
    lose,
    victim,
)
from scripts.faults.trials.stage import HANG_S, HEARTBEAT_S, Row, Stage

WAKES: Final = ("never", "to die", "to speak", "to speak")
SUSPICIOUS_S: Final = 4 * HEARTBEAT_S
TURN_S: Final = 2 * HEARTBEAT_S
"""The time between two heartbeats, plus the controller's reaction."""
LAST_LOOK_S: Final = 0.75 * HANG_S
GRANTED_S: Final = 0.05
"""The time within which a request is granted to a worker that accepts it."""
RECENT_S: Final = 3 * HEARTBEAT_S
SLOWEST_PREFILL: Final = 100.0 / HANG_S
"""Prompt tokens per second below which the hang time-out expires."""
SLOW_FACTOR: Final = 20
SLOW_S: Final = 1.0
CLEARLY: Final = 3.0
"""Two paces differ when their ratio exceeds this factor."""


async def stopped(stage: Stage) -> None:
    """SIGSTOP. The worker may continue after its loss: it exits, or sends events until killed."""
    index = await victim(stage)
    pid, wakes = stage.service.pids[index], stage.rng.choice(WAKES)
    before = await stage.service.counters()
    if wakes == "to speak":
        # The kill ladder's first rung, which waits for the worker to continue, would end
        # it.
        await carry_out(stage, index, "ignore-abort")

    def wake() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    since = stage.service.mark()
    await asyncio.gather(
        _ask_while_silent(stage, index),
        _lose_stuck(stage, index, signal.SIGSTOP, wake=None if wakes == "never" else wake),
    )
    if wakes == "never":
        await stage.service.wait_line(rf"worker {index}: pid {pid} killed by SIGKILL", since=since)
    grown = await stage.service.counters()
    strangers = grown["unknown_frames_total"] - before["unknown_frames_total"]
    if wakes == "to speak" and strangers < 1:
        stage.result.violate("the worker that continued sent no event that was fenced")


async def _lose_stuck(
    stage: Stage, index: int, harm: signal.Signals | str, *, wake: Callable[[], None] | None = None
) -> Loss:
    """Lose a worker that makes no progress, within the time that its prompts allow."""
    pending = 0

    def harmed() -> None:
        nonlocal pending
        if isinstance(harm, str):
            stage.service.order(index, harm)
        else:
            kill(stage, index, harm)
        pending = _pending_tokens(stage, index)

    before = len(stage.result.recovery_s)
    loss = await lose(stage, index, harmed, wake)
    allowed_s = HANG_S + pending / SLOWEST_PREFILL + 1.0
    for name, times_s, bound_s in (
        ("seen", [loss.lost.time_s - loss.harmed_s], allowed_s),
        ("resumed", stage.result.recovery_s[before:], allowed_s + RECOVERY_S),
    ):
        if (worst_s := max(times_s, default=0.0)) > stage.settings.slack * bound_s:
            stage.result.violate(f"{name} after {worst_s:.2f} s, allowed: {bound_s:.2f} s")
    return loss


def _pending_tokens(stage: Stage, index: int) -> int:
    """Prompt tokens of the steps that a worker may be in, as far as its clients can tell."""
    now = time.monotonic()
    return sum(
        seen.ask.n * stage.oracle.expected(seen.ask).usage[0]
        for seen in stage.load.seen.values()
        if not seen.ended_s
        and seen.owner in (None, index)
        and (now - seen.sent_s < RECENT_S or (seen.ask.stream and not seen.chunks_s))
    )


async def _ask_while_silent(stage: Stage, index: int) -> None:
    """A worker that misses four heartbeats gets no more requests, even ones pinned to it."""
    # A busy machine may be late, but not later than the loss.
    await asyncio.sleep(min(stage.settings.slack * (SUSPICIOUS_S + TURN_S), LAST_LOOK_S))
    before = await _held(stage, index)
    seen = Seen(replace(by_length(stage)[0], rank=index))
    asked = asyncio.create_task(stage.service.client.stream(seen.ask, seen))
    await asyncio.sleep(GRANTED_S)
    if (held := await _held(stage, index)) > before:
        stage.result.violate(f"a silent worker has {held} requests, after {before}")
    await asked
    # If the loss came first, a request pinned to the lost worker is refused.
    if seen.status != 503:
        stage.result.take(seen, stage.oracle.expected(replace(seen.ask, rank=None)))


async def _held(stage: Stage, index: int) -> int:
    """Requests that were granted to a worker and have not ended."""
    loads = (await stage.service.get("/v1/loads"))["loads"]
    return int(loads[index]["num_running_reqs"])


async def hung(stage: Stage) -> None:
    index = await victim(stage)
    since = stage.service.mark()
    await _lose_stuck(stage, index, "hang")
    # The kill ladder's first rung makes the worker log where it hangs.
    await stage.service.wait_line(rf"worker {index}: .*_hang", 5.0, since=since)


async def slow(stage: Stage) -> None:
    """A worker 20 times slower for a while is not killed, gets fewer requests, and recovers."""
    service, load = stage.service, stage.load
    index = await victim(stage)
    since = service.mark()
    await carry_out(stage, index, f"slow {SLOW_FACTOR}")
    slowed_s = time.monotonic()
    load.ended.clear()
    during = Seen(replace(by_length(stage)[0], rank=index))
    pinned = asyncio.create_task(service.client.stream(during.ask, during))
    await asyncio.sleep(SLOW_S)
    seen = [*load.ended, *(each for each in load.seen.values() if not each.ended_s)]
    await carry_out(stage, index, "slow 1")
    healed_s = time.monotonic()
    _check_shift(stage, index, [each for each in seen if each.sent_s >= slowed_s])
    after = await service.client.stream(replace(by_length(stage)[0], rank=index))
    await pinned
    peers = _pace(
        (each for each in seen if each.ask.n == 1 and each.owner not in (None, index)),
        *(slowed_s, healed_s),
    )
    slowed = _pace([during], slowed_s, healed_s)
    healed = _pace([after], healed_s, after.ended_s)
    if not slowed * CLEARLY < peers:
        stage.result.violate(f"{slowed:.0f} tokens/s is not slow beside {peers:.0f}")
    if not healed * CLEARLY > peers:
        stage.result.violate(f"{healed:.0f} tokens/s is still slow beside {peers:.0f}")
    for each in (during, after):
        stage.result.take(each, stage.oracle.expected(replace(each.ask, rank=None)))
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers were killed for being slow")
    await all_ended(stage, load.streaming((index,)))


def _check_shift(stage: Stage, index: int, asked: list[Seen]) -> None:
    """A slow worker gets fewer requests than the others get on average, over all trials.

    One trial has few requests: a worker may get 3 of 9 by chance.
    """
    grants = stage.result.grants
    for seen in asked:
        if seen.owner is not None:
            grants["slow" if seen.owner == index else "others"] += 1
    if stage.result.trials < stage.settings.trials:
        return
    if grants["slow"] * (stage.settings.workers - 1) >= grants["others"]:
        stage.result.violate(f"slow workers got as many requests as their peers: {dict(grants)}")


def _pace(streams: Iterable[Seen], begin_s: float, end_s: float) -> float:
    """Chunks per second of a stream between two times, or 0 without chunks."""
    chunks, spent_s = 0, 0.0
    for seen in streams:
        times_s = [at for at in seen.chunks_s if begin_s <= at <= end_s]
        if len(times_s) > 1:
            chunks += len(times_s) - 1
            spent_s += times_s[-1] - times_s[0]
    return chunks / spent_s if spent_s else 0.0


STUCK_ROWS: Final = (
    Row(name="F5", title="SIGSTOP, SIGCONT", trial=stopped),
    Row(name="F6", title="decode loop hangs", trial=hung),
    # A slow worker computes 50 ms of work in a second, so the hang time-out is longer.
    Row(name="F7", title="20 times slower", trial=slow, hang_s=3.0),
)
