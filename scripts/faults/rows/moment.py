"""Deaths at chosen moments of a request: in its prefill, once accepted, before Finished is sent."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Final

from scripts.faults.service.client import Seen
from scripts.faults.service.process import EVENT_TIMEOUT_S, ServiceError
from scripts.faults.trials.loss import (
    DETECTION_S,
    RECOVERY_S,
    by_length,
    carry_out,
    died_s,
    lost_alone,
    total,
)
from scripts.faults.trials.stage import Row, Stage

COMPLETE: Final = "die-before finished"
MOMENTS: Final = ("die-in-prefill", "die-after accepted", COMPLETE)


async def kill_at_a_moment(stage: Stage) -> None:
    """The worker's only request is retried silently, or none of its tokens is recomputed."""
    service = stage.service
    index, moment = stage.rng.choice(stage.workers()), stage.rng.choice(MOMENTS)
    pid, since, before = service.pids[index], service.mark(), await service.counters()
    asks = by_length(stage)
    harmed = Seen(asks[0])
    others: list[Seen] = []
    for rank in stage.workers():
        if rank != index:
            others.append(Seen(replace(asks[-1 - len(others)], rank=rank)))
    tasks = [_ask(stage, seen) for seen in others]
    # Long requests keep the other workers busy, so that this worker gets the next request.
    if not await stage.load.wait_for(
        lambda: all(seen.chunks_s for seen in others), EVENT_TIMEOUT_S
    ):
        raise ServiceError("the other workers do not stream")
    await carry_out(stage, index, moment)
    tasks.append(_ask(stage, harmed))
    lost = await service.wait_lost(index, since)
    await service.wait_ready(index, since)
    await asyncio.gather(*tasks)
    fell_s = died_s(stage, pid)
    stage.result.detection_s.append(lost.time_s - fell_s)
    if harmed.chunks_s:
        mended_s = harmed.ended_s if moment == COMPLETE else harmed.chunks_s[0]
        stage.result.recovery_s.append(mended_s - fell_s)
    lost_alone(stage, since)
    for seen in (harmed, *others):
        stage.result.take(seen, stage.oracle.expected(replace(seen.ask, rank=None)))
    grown = await service.counters()
    grown.subtract(before)
    _check(stage, moment, [harmed, *others], grown)


def _ask(stage: Stage, seen: Seen) -> asyncio.Task[Seen]:
    return asyncio.create_task(stage.service.client.stream(seen.ask, seen))


def _check(stage: Stage, moment: str, asked: list[Seen], grown: Counter[str]) -> None:
    """Check that no token was computed twice and that no complete request was granted again."""
    replays = 0 if moment == COMPLETE else 1
    expected = {
        "requests_replayed_total": replays,
        "grants_total": len(asked) + replays,
        "owner_generation_tokens_total": sum(seen.usage[1] for seen in asked),
        "duplicate_chunks_total": 0,
    }
    for name, count in expected.items():
        if (found := total(grown, name)) != count:
            stage.result.violate(f"{moment}: {name} grew by {found} in place of {count}")


MOMENT_ROW: Final = Row(
    name="F3",
    title="SIGKILL in prefill, after Accepted, before Finished",
    trial=kill_at_a_moment,
    load=False,
    arguments=("--fake-prefill-rate", "2000"),
    bounds_s=(DETECTION_S, RECOVERY_S),
)
