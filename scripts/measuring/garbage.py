"""100 MB of garbage for the controller, on its workers' socket and over HTTP."""

import argparse
import asyncio
import random
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import zmq

from scripts.benchmarks.results.report import mebibytes
from scripts.faults.service.client import Ask
from scripts.faults.service.process import ChaosService
from scripts.faults.service.raw_client import address
from scripts.faults.trials.stage import Row, Settings, Stage, eventually
from scripts.measuring.value import Measured

GROWTH: Final = 50 * 2**20
CHUNK: Final = 2**20
WHOLE: Final = 1.25
"""The bound per byte of a many-part message: libzmq collects all parts before we drop it."""
PATIENCE_S: Final = 60.0
SETTLE_S: Final = 1.0


async def measure_garbage(options: argparse.Namespace) -> list[Measured]:
    """Measure the growth of the controller's memory, and whether it serves afterwards."""
    nbytes = options.megabytes * 10**6
    settings = Settings(
        trials=1, seed=options.seed, model=None, workers=options.workers, streams=1, slack=1.0
    )
    stage = Stage(Row(name="garbage", title="", trial=_nothing), settings)
    service = stage.new_service()
    try:
        await service.start()
        await service.client.stream(Ask(prompt="warm", max_tokens=8))
        found = await _growth(service, random.Random(options.seed), nbytes)
        seen = await service.client.stream(stage.oracle.draw())
        stage.result.take(seen, stage.oracle.expected(seen.ask))
        await stage.end(service)
    finally:
        await service.stop()
    broken = len(stage.result.violations) + service.deaths(0)
    return [*found, Measured.bounded("violations and deaths after it", broken, 0, str)]


async def _growth(service: ChaosService, rng: random.Random, nbytes: int) -> list[Measured]:
    strangers = Strangers(service, rng)
    floods = (
        ("on its socket", strangers.flood, GROWTH),
        ("there in one message of many parts", strangers.flood_parts, WHOLE * nbytes),
        ("on HTTP", partial(_flood_http, service, rng), GROWTH),
    )
    found = []
    for name, send, allowed in floods:
        before = service.footprint().rss_nbytes
        peak = Peak(service)
        sent = await peak.during(send(nbytes))
        text = f"RSS growth for {sent / 10**6:.0f} MB offered {name}"
        found.append(Measured.bounded(text, peak.rss_nbytes - before, allowed, mebibytes))
    text = f"messages of strangers that did not arrive, of {strangers.messages}"
    missing = strangers.messages - await strangers.arrived()
    return [*found, Measured.bounded(text, missing, 0, str)]


async def _nothing(_stage: Stage) -> None:
    """This measure has no trials."""


class Peak:
    """Samples the controller's memory during some work."""

    def __init__(self, service: ChaosService) -> None:
        self._service = service
        self.rss_nbytes = 0

    async def during(self, work: Coroutine[None, None, int]) -> int:
        """Return the work's result, a moment after its end."""
        task = asyncio.create_task(work)
        ends_s: float | None = None
        while ends_s is None or time.monotonic() < ends_s:
            self.rss_nbytes = max(self.rss_nbytes, self._service.footprint().rss_nbytes)
            await asyncio.sleep(0.02)
            if task.done() and ends_s is None:
                ends_s = time.monotonic() + SETTLE_S
        return task.result()


class Strangers:
    """Sends raw frames to the workers' endpoint.

    ``messages``: the number of messages below the size limit.
    """

    def __init__(self, service: ChaosService, rng: random.Random) -> None:
        self._service: Final = service
        self._rng: Final = rng
        self.messages = 0

    async def arrived(self) -> int:
        """How many the controller has counted: all of them, or those until the time-out."""
        counted = 0

        async def all_are_there() -> bool:
            nonlocal counted
            counted = (await self._service.counters())["unknown_frames_total"]
            return counted >= self.messages

        await eventually(all_are_there)
        return counted

    async def flood(self, nbytes: int) -> int:
        """Send half in frames within the size limit, half in one frame beyond it."""
        small = nbytes // CHUNK
        with self._socket("stranger") as stranger:
            for _ in range(small):
                await self._send(stranger, [self._rng.randbytes(CHUNK // 2)])
            self.messages += small
            await self.arrived()
        with self._socket("giant") as giant:
            await self._send(giant, [self._rng.randbytes(nbytes // 2)])
            # Messages in our own queues have not arrived yet.
            await asyncio.sleep(SETTLE_S)
        return small * (CHUNK // 2) + nbytes // 2

    async def flood_parts(self, nbytes: int) -> int:
        """Send one message of many small parts: each passes the size limit of libzmq."""
        parts = nbytes // CHUNK
        with self._socket("parts") as stranger:
            await self._send(stranger, [self._rng.randbytes(CHUNK)] * parts)
            self.messages += 1
            await self.arrived()
        return parts * CHUNK

    @contextmanager
    def _socket(self, identity: str) -> Iterator[zmq.Socket[bytes]]:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, identity.encode())
        stranger.setsockopt(zmq.SNDHWM, 4)
        stranger.connect(self._service.endpoint())
        try:
            yield stranger
        finally:
            context.destroy(linger=0)

    async def _send(self, stranger: zmq.Socket[bytes], parts: list[bytes]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    stranger.send_multipart(parts, zmq.DONTWAIT)
                    return
                except zmq.Again:
                    await asyncio.sleep(0.005)


async def _flood_http(service: ChaosService, rng: random.Random, nbytes: int) -> int:
    """An endless header, a body with a length, one without, and random bytes."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    part = nbytes // 4
    openings = (
        b"%sX-Long: " % head,
        b"%sContent-Length: %d\r\n\r\n" % (head, part),
        b"%sTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (head, part),
        b"",
    )
    sent = 0
    for opening in openings:
        # As many connections as needed, since each is closed early.
        goal = sent + part
        ends_s = time.monotonic() + PATIENCE_S
        while sent < goal and time.monotonic() < ends_s:
            sent += await _send_until_closed(service, opening, rng, goal - sent)
    return sent


async def _send_until_closed(
    service: ChaosService, opening: bytes, rng: random.Random, nbytes: int
) -> int:
    reader, writer = await asyncio.open_connection(*address(service))
    sent = 0
    noise = rng.randbytes(CHUNK).replace(b"\r", b"x").replace(b"\n", b"x")
    try:
        writer.write(opening)
        async with asyncio.timeout(PATIENCE_S):
            while sent < nbytes and not reader.at_eof():
                writer.write(noise)
                await writer.drain()
                sent += len(noise)
                await asyncio.sleep(0)
    except OSError:
        # The server closed the connection, as it should. Data in flight counts as sent.
        sent += CHUNK
    finally:
        writer.transport.abort()
    return sent
