"""Workers that stop or hang within a long prompt, or at the first tokens after it.

Times are the product's defaults: a heartbeat every 0.5 s, and hung after 10 s.
"""

import asyncio
import signal
import time
from dataclasses import replace
from typing import Final

from scripts.faults.service.client import Ask, Seen
from scripts.faults.service.process import EVENT_TIMEOUT_S, ServiceError
from scripts.faults.trials.loss import kill, lost_alone
from scripts.faults.trials.stage import Row, Stage
from scripts.faults.verdicts.verdict import Expected

WORDS: Final = 900
ANSWER_TOKENS: Final = 24
FIRST_TOKENS: Final = (1, 2, 5)
HANG_TIMEOUT_S: Final = 10.0
LATE_S: Final = 2.0
"""From a worker's last event to its fault, and from the time-out to the loss."""
PREFILL_MARGIN: Final = 8.0
"""Allowed time for a prompt, as a multiple of the last comparable one."""
LOOK_S: Final = 0.1
LONGEST_S: Final = 300.0


async def stuck_at_long_prompt(stage: Stage) -> None:
    """A worker stops or hangs, and is lost in time; its client gets the complete response."""
    service, rng = stage.service, stage.rng
    if stage.settings.workers < 2:
        raise ServiceError("this row compares with another worker: use --workers 2 or more")
    index, witness = rng.sample(stage.workers(), k=2)
    ask = _long_ask(stage)
    # A worker's pace is known only after its first prompt.
    await service.client.stream(replace(_long_ask(stage), max_tokens=1, rank=index))
    undisturbed = await service.client.stream(replace(ask, rank=witness))
    prefill_s = undisturbed.chunks_s[0] - undisturbed.sent_s
    within, hangs = rng.random() < 0.5, rng.random() < 0.5
    seen = Seen(replace(ask, rank=index))
    asked = asyncio.create_task(service.client.stream(seen.ask, seen))
    await _moment(stage, seen, prefill_s if within else None)
    since, harmed_s = service.mark(), time.monotonic()
    if hangs:
        service.order(index, "hang")
    else:
        kill(stage, index, signal.SIGSTOP)
    health = asyncio.create_task(_degraded_s(stage))
    lost = await service.wait_line(rf"worker {index}: lost\b", LONGEST_S, since=since)
    stage.result.detection_s.append(lost.time_s - harmed_s)
    await service.wait_ready(index, since)
    await asked
    if await health >= lost.time_s:
        stage.result.violate("/health was never degraded before the worker was lost")
    _check(stage, seen, undisturbed, harmed_s, lost.time_s, within_s=prefill_s if within else 0.0)
    lost_alone(stage, since)


def _long_ask(stage: Stage) -> Ask:
    """A long prompt without a cached prefix."""
    words = (
        f"{stage.rng.getrandbits(32):08x} the old lighthouse stood above a grey sea and ".split()
    )
    prompt = " ".join(words[at % len(words)] for at in range(WORDS))
    return Ask(prompt=prompt, max_tokens=ANSWER_TOKENS)


async def _moment(stage: Stage, seen: Seen, prefill_s: float | None) -> None:
    """Wait for the middle of the prompt, which takes ``prefill_s``, or for one of its tokens."""
    if prefill_s is not None:
        await asyncio.sleep(stage.rng.uniform(0.2, 0.8) * prefill_s)
        return
    tokens = stage.rng.choice(FIRST_TOKENS)
    if not await stage.load.wait_for(lambda: len(seen.chunks_s) >= tokens, EVENT_TIMEOUT_S):
        raise ServiceError("the long prompt never finished")


async def _degraded_s(stage: Stage) -> float:
    """Poll /health until it reports a worker overdue or lost; return that time."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < LONGEST_S:
        answer = await stage.service.client.http.get("/health")
        if (answer.status_code, answer.json()["status"]) == (200, "degraded"):
            return time.monotonic()
        await asyncio.sleep(LOOK_S)
    raise ServiceError("/health was never degraded")


def _check(
    stage: Stage,
    seen: Seen,
    undisturbed: Seen,
    harmed_s: float,
    lost_s: float,
    *,
    within_s: float,
) -> None:
    stage.result.take(seen, Expected.of(undisturbed))
    allowed_s = HANG_TIMEOUT_S + LATE_S + PREFILL_MARGIN * within_s
    if (took_s := lost_s - harmed_s) > stage.settings.slack * allowed_s:
        stage.result.violate(f"lost after {took_s:.1f} s, allowed: {allowed_s:.1f} s")
    resumed_s = seen.resumed_s(harmed_s, lost_s) if not within_s else seen.chunks_s[0]
    if resumed_s is not None:
        stage.result.recovery_s.append(resumed_s - harmed_s)


LONG_PROMPT_ROW: Final = Row(
    name="F28",
    title="SIGSTOP and hang, within a long prompt and after it",
    trial=stuck_at_long_prompt,
    load=False,
    arguments=("--fake-prefill-rate", "500"),
    hang_s=None,
)
