"""F16: clients that request long responses and read nothing."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Final

from scripts.benchmarks.results.report import milliseconds, quantile
from scripts.faults.service.client import Ask
from scripts.faults.service.raw_client import close, connect, first_event, plain_ask, raw_stream
from scripts.faults.trials.stage import SPARE_FDS, Row, Stage, eventually

READERS: Final = 8
WINDOW_NBYTES: Final = 4096
RATE: Final = 1000.0
WORDY_ANSWER: Final = 1200
"""With log-probabilities, half of the response exceeds the system's own buffers."""
LONGEST_ANSWER: Final = 8000
"""1.5 MB as bare events."""
GENERATED_S: Final = 60.0
NBYTES_A_READER: Final = 512 * 2**10
OTHERS: Final = 4
GAP_S: Final = 0.1
STUCK_S: Final = 35.0
"""A client that reads nothing is closed after 30 s, and no flag shortens it."""


async def does_not_read(stage: Stage) -> None:
    """They delay no other stream and cost bounded memory; the last trial waits until they close."""
    if stage.result.trials == 1:
        # Memory that a process allocates for its first responses stays allocated.
        await _others(stage)
    last = stage.result.trials == stage.settings.trials
    ask = Ask(prompt="", max_tokens=LONGEST_ANSWER)
    if not last:
        ask = replace(ask, max_tokens=WORDY_ANSWER, logprobs=5)
    before = stage.service.footprint()
    readers = [connect(stage.service, receive_buffer=WINDOW_NBYTES) for _ in range(READERS)]
    try:
        for reader in readers:
            prompt = plain_ask(stage.rng, 1).prompt
            reader.sendall(raw_stream(replace(ask, prompt=prompt)))
        await asyncio.gather(*(first_event(reader) for reader in readers))
        await _others(stage)
        await _all_is_generated(stage)
        after = stage.service.footprint()
        _judge(stage, after.rss_nbytes - before.rss_nbytes, after.fds - before.fds)
        if last:
            await _closed(stage, before.fds)
    finally:
        close(readers)
    await eventually(lambda: _holds_at_most(stage, before.fds))


def _judge(stage: Stage, grown_nbytes: int, held: int) -> None:
    if grown_nbytes > READERS * NBYTES_A_READER:
        stage.result.violate(f"{READERS} readers that read nothing cost {grown_nbytes} bytes")
    if held < READERS - SPARE_FDS:
        stage.result.violate(f"of {READERS} readers only {held} were stalled")


async def _others(stage: Stage) -> None:
    """Streams of clients that do read: complete, and without long gaps."""
    drawn = [stage.oracle.draw() for _ in range(OTHERS)]
    seen = await asyncio.gather(*(stage.service.client.stream(ask) for ask in drawn))
    gaps = [after - before for each in seen for before, after in pairwise(each.chunks_s)]
    for each in seen:
        stage.result.take(each, stage.oracle.expected(each.ask))
    allowed_s = GAP_S * stage.settings.slack
    if not gaps:
        stage.result.violate("there was no stream that could have been delayed")
    elif (p99_s := quantile(gaps, 0.99)) > allowed_s:
        stage.result.violate(
            f"gaps of other streams p99 {milliseconds(p99_s)}, allowed {milliseconds(allowed_s)}"
        )


async def _all_is_generated(stage: Stage) -> None:
    async def over() -> bool:
        return await stage.service.running() == 0

    if not await eventually(over, GENERATED_S):
        stage.result.violate("unread responses never ended")


async def _closed(stage: Stage, fds: int) -> None:
    allowed_s = STUCK_S * stage.settings.slack
    if not await eventually(lambda: _holds_at_most(stage, fds), allowed_s, pause_s=0.1):
        stage.result.violate(f"readers that read nothing were not closed within {allowed_s:g} s")


async def _holds_at_most(stage: Stage, fds: int) -> bool:
    return stage.service.footprint().fds <= fds


SLOW_READER: Final = Row(
    name="F16",
    title=f"{READERS} clients do not read (once until they are closed)",
    trial=does_not_read,
    load=False,
    rate=RATE,
)
