"""F15: clients that disconnect (FIN, RST, power loss) while queued, in prefill or in decode."""

import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from scripts.faults.service.client import Ask
from scripts.faults.service.process import ChaosService
from scripts.faults.service.raw_client import (
    asking,
    close,
    first_event,
    lose_power,
    plain_ask,
    reset_at_close,
    unanswered,
)
from scripts.faults.service.system import DROPS_ARRIVALS
from scripts.faults.trials.stage import QUIET_S, Row, Stage, eventually

FREED_S: Final = 0.1
DECODE_S: Final = 0.02
PREFILL_RATE: Final = 1000
CHUNK: Final = 20
STEP_S: Final = DECODE_S + CHUNK / PREFILL_RATE
LONG_ANSWER: Final = 4000
LONG_PROMPT: Final = 3000
"""Three seconds of prefill: a client that leaves in the first second leaves during prefill."""
PROBE_TOKENS: Final = 3
NO_WORD_S: Final = 35.0
"""TCP keep-alive takes 30 s to find a dead peer, and no flag shortens it."""
ABORTED: Final = 'requests_total{outcome="aborted"}'


async def leaves(stage: Stage) -> None:
    """The slots of clients that disconnect are free at once, and serve the next request."""
    service = stage.service
    before = (await service.counters())[ABORTED]
    phases = (_while_queued, _in_prefill, _in_decode)
    left = await stage.rng.choice(phases)(stage)
    if stage.result.trials == stage.settings.trials and DROPS_ARRIVALS:
        left += await _without_a_word(stage)
    if (aborted := (await service.counters())[ABORTED] - before) != left:
        stage.result.violate(f"{left} clients left, {aborted} requests were aborted")
    await _probe(stage)


async def _while_queued(stage: Stage) -> int:
    """Disconnect the queued clients first, then the clients that hold all slots."""
    service = stage.service
    decoding = await _decoding(stage, stage.settings.workers)
    waiting = asking(service, _asks(stage, stage.rng.randint(1, 2 * stage.settings.workers)))
    both = len(decoding) + len(waiting)
    await _expect(stage, lambda: _load_is(service, len(decoding), len(waiting)))
    await _part(stage, waiting, lambda: _load_is(service, len(decoding), 0))
    await _part(stage, decoding, lambda: _load_is(service, 0, 0))
    return both


async def _in_prefill(stage: Stage) -> int:
    service = stage.service
    count = stage.rng.randint(1, stage.settings.workers)
    asks = [replace(ask, prompt=ask.prompt.ljust(LONG_PROMPT, "p")) for ask in _asks(stage, count)]
    clients = asking(service, asks)
    await _expect(stage, lambda: _load_is(service, count, 0))
    if not all(unanswered(client) for client in clients):
        stage.result.violate("the prefill ended before the client left")
    await _part(stage, clients, lambda: _load_is(service, 0, 0))
    return count


async def _in_decode(stage: Stage) -> int:
    clients = await _decoding(stage, stage.rng.randint(1, stage.settings.workers))
    await _part(stage, clients, lambda: _load_is(stage.service, 0, 0))
    return len(clients)


async def _without_a_word(stage: Stage) -> int:
    """Power loss of a client in decode and in the queue. It takes long, so only once a row."""
    service = stage.service
    decoding = await _decoding(stage, stage.settings.workers)
    waiting = asking(service, _asks(stage, stage.settings.workers))
    await _expect(stage, lambda: _load_is(service, len(decoding), len(waiting)))
    gone = [*waiting, *decoding]
    for client in gone:
        lose_power(client)
    allowed_s = NO_WORD_S * stage.settings.slack
    if not await eventually(lambda: _load_is(service, 0, 0), allowed_s, pause_s=0.1):
        stage.result.violate(f"half-open clients still held slots or places after {allowed_s:g} s")
    close(gone)
    return len(gone)


async def _decoding(stage: Stage, count: int) -> list[socket.socket]:
    clients = asking(stage.service, _asks(stage, count))
    for client in clients:
        await first_event(client)
    return clients


def _asks(stage: Stage, count: int) -> list[Ask]:
    return [plain_ask(stage.rng, LONG_ANSWER) for _ in range(count)]


async def _part(
    stage: Stage, clients: list[socket.socket], freed: Callable[[], Awaitable[bool]]
) -> None:
    for client in clients:
        if stage.rng.random() < 0.5:
            reset_at_close(client)
    left_s = time.monotonic()
    close(clients)
    if not await eventually(freed, QUIET_S, pause_s=0.001):
        stage.result.violate("a slot was never freed")
    stage.result.detection_s.append(time.monotonic() - left_s)


async def _expect(stage: Stage, holds: Callable[[], Awaitable[bool]]) -> None:
    if not await eventually(holds, QUIET_S, pause_s=0.005):
        stage.result.violate("the requests of the leaving clients never reached slots and queue")


async def _load_is(service: ChaosService, running: int, waiting: int) -> bool:
    total = (await service.get("/v1/loads"))["aggregate"]
    return (total["num_running_reqs"], total["num_waiting_reqs"]) == (running, waiting)


async def _probe(stage: Stage) -> None:
    rank = stage.rng.choice(stage.workers())
    ask = plain_ask(stage.rng, PROBE_TOKENS, rank=rank)
    stage.result.take(await stage.service.client.stream(ask), stage.oracle.expected(ask))


LEAVING: Final = Row(
    name="F15",
    title="client leaves (FIN, RST; once without a word) in queue, prefill, decode",
    trial=leaves,
    load=False,
    rate=1.0 / DECODE_S,
    arguments=(
        *("--fake-prefill-rate", str(PREFILL_RATE), "--chunked-prefill-size", str(CHUNK)),
        *("--max-running-requests", "1"),
    ),
    bounds_s=(STEP_S + FREED_S, float("inf")),
)
