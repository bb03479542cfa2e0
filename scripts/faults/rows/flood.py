"""F19: silent connections, and more requests than the queue takes."""

import asyncio
from typing import Final

from scripts.faults.service.client import Seen
from scripts.faults.service.raw_client import ask_raw, close, connect, plain_ask
from scripts.faults.trials.stage import Row, Stage

SILENT: Final = 500
REQUESTS: Final = 500
MOST_SILENT: Final = 2000
MOST_REQUESTS: Final = 10_000
AT_A_TIME: Final = 250
"""Open requests at once: one client process sends and reads all of them."""
SLOTS: Final = 8
QUEUE: Final = 32
RATE: Final = 1000.0
LENGTHS: Final = (20, 120)
REFUSED_S: Final = 1.0
TURNS: Final = 1 + QUEUE / SLOTS
"""The time to serve a full queue if one worker had all of it."""
ACCEPTED_S: Final = TURNS * LENGTHS[1] / RATE + REFUSED_S


async def flood(stage: Stage) -> None:
    """Requests are refused with 429 at once, or served in time; the last trial is full size."""
    full = stage.result.trials == stage.settings.trials
    silent = [connect(stage.service) for _ in range(MOST_SILENT if full else SILENT)]
    room = asyncio.Semaphore(AT_A_TIME)

    async def ask() -> Seen:
        async with room:
            ask = plain_ask(stage.rng, stage.rng.randint(*LENGTHS))
            return await ask_raw(stage.service, ask)

    try:
        requests = MOST_REQUESTS if full else REQUESTS
        seen = await asyncio.gather(*(ask() for _ in range(requests)))
    finally:
        close(silent)
    _judge(stage, seen)


def _judge(stage: Stage, seen: list[Seen]) -> None:
    refused = [each for each in seen if each.status == 429]
    accepted = [each for each in seen if each.status != 429]
    stage.result.refused += len(refused)
    if not refused:
        stage.result.violate(f"none of {len(seen)} requests was refused")
    if len(accepted) < QUEUE:
        stage.result.violate(f"only {len(accepted)} of {len(seen)} requests were accepted")
    for each in refused:
        if not each.retry_after:
            stage.result.violate("429 without Retry-After")
        stage.result.detection_s.append(each.ended_s - each.sent_s)
    for each in accepted:
        stage.result.take(each, stage.oracle.expected(each.ask))
        stage.result.recovery_s.append(each.ended_s - each.sent_s)


FLOOD: Final = Row(
    name="F19",
    title=(
        f"{SILENT} silent connections, {REQUESTS} requests at once "
        f"(once {MOST_SILENT} and {MOST_REQUESTS})"
    ),
    trial=flood,
    load=False,
    rate=RATE,
    arguments=("--max-running-requests", str(SLOTS), "--max-queued-requests", str(QUEUE)),
    bounds_s=(REFUSED_S, ACCEPTED_S),
)
