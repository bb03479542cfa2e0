"""Faults of clients: those that leave, do not read, flood, or send nonsense."""

import asyncio
import json
import resource
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chaos_client import MODEL, Ask, Seen
from chaos_nonsense import malformed_requests
from chaos_service import ChaosService
from chaos_stage import QUIET_S, Row, Stage, eventually

FREED_S: Final = 0.1
STEP_S: Final = 0.02
FLOOD: Final = 200
QUEUE: Final = 32
SILENT_CONNECTIONS: Final = 200
REFUSED_S: Final = 1.0
SPARE_FILES: Final = 6
NO_ANSWER: Final = 0
OVERLONG: Final = (8193, 10 * 2**20)


def address(service: ChaosService) -> tuple[str, int]:
    url = service.client.http.base_url
    assert url.port is not None
    return url.host, url.port


def http_request(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def raw_stream(ask: Ask) -> bytes:
    return http_request(json.dumps(ask.body()).encode())


def connect(service: ChaosService, *, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(address(service))
    return client


async def leaves(stage: Stage) -> None:
    """FIN or RST while queued, in prefill or in decode: the slots are free at once."""
    service = stage.service
    clients = [connect(service) for _ in range(stage.rng.randint(1, 2 * stage.settings.workers))]
    for client in clients:
        ask = replace(stage.oracle.draw(), max_tokens=2000, by_openai=False)
        client.sendall(raw_stream(ask))
    await asyncio.sleep(stage.rng.random() * 0.3)
    for client in clients:
        if stage.rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left_s = time.monotonic()
    _close(clients)

    async def freed() -> bool:
        return await service.running() == 0

    if not await eventually(freed, QUIET_S, pause_s=0.001):
        stage.result.violate("a slot was never freed")
    stage.result.detection_s.append(time.monotonic() - left_s)


async def does_not_read(stage: Stage) -> None:
    """A reader with a closed window holds up nobody, and costs bounded memory."""
    service = stage.service
    before = service.footprint()
    client = connect(service, receive_buffer=4096)
    try:
        client.sendall(raw_stream(Ask(prompt="slow reader", max_tokens=8000)))
        others = [Seen(stage.oracle.draw()) for _ in range(4)]
        await asyncio.gather(*(service.client.stream(seen.ask, seen) for seen in others))
        for seen in others:
            stage.result.take(seen, stage.oracle.expected(seen.ask))
        grown = service.footprint().rss_nbytes - before.rss_nbytes
        if grown > 32 * 2**20:
            stage.result.violate(f"a reader that does not read cost {grown / 2**20:.0f} MiB")
    finally:
        client.close()


async def nonsense(stage: Stage) -> None:
    """Malformed HTTP, JSON and fields: 4xx or a closed connection, and a quiet log."""
    service = stage.service
    since = service.mark()
    began = (await service.counters())["requests_started_total"] if not stage.row.load else None
    for name, data in malformed_requests(stage.rng):
        status = await _status(service, data)
        if status is not None and not 400 <= status < 500:
            stage.result.violate(f"{name}: status {status}")
    if began is not None and (await service.counters())["requests_started_total"] != began:
        stage.result.violate("nonsense reached the queue")
    if deaths := service.deaths(since):
        stage.result.violate(f"{deaths} workers died")
    logged = sum(len(line.text) for line in service.lines[since:])
    if logged > 20_000:
        stage.result.violate(f"{logged} bytes of log for it")


async def _status(service: ChaosService, data: bytes) -> int | None:
    """The status of the answer, None when the connection is closed without one, or NO_ANSWER."""
    reader, writer = await asyncio.open_connection(*address(service))
    try:
        async with asyncio.timeout(QUIET_S):
            writer.write(data)
            line = await reader.readline()
    except TimeoutError:
        return NO_ANSWER
    except OSError:
        return None
    finally:
        writer.transport.abort()
    return int(line.split()[1]) if line else None


async def flood(stage: Stage) -> None:
    """Silent connections and more requests than the queue takes: fast 429, and nobody waits."""
    service = stage.service
    silent = [connect(service) for _ in range(SILENT_CONNECTIONS)]
    try:
        seen = [Seen(replace(stage.oracle.draw(), by_openai=False)) for _ in range(FLOOD)]
        await asyncio.gather(*(service.client.stream(each.ask, each) for each in seen))
    finally:
        for client in silent:
            client.close()
    for each in seen:
        if each.status == 429:
            stage.result.refused += 1
            if not each.retry_after:
                stage.result.violate("429 without Retry-After")
            stage.result.detection_s.append(each.ended_s - each.sent_s)
        else:
            stage.result.take(each, stage.oracle.expected(each.ask))


async def overlong(stage: Stage) -> None:
    """A prompt beyond the context is refused in a second, and others go on."""
    for size in OVERLONG:
        began_s = time.monotonic()
        body = {"model": MODEL, "prompt": "x" * size, "max_tokens": 4}
        answer = await stage.service.client.http.post("/v1/completions", json=body)
        stage.result.detection_s.append(time.monotonic() - began_s)
        if answer.status_code not in (400, 413):
            stage.result.violate(f"{size} characters: status {answer.status_code}")


async def no_descriptors(stage: Stage) -> None:
    """The controller may open no further file: streams go on, and it recovers."""
    service = stage.service
    limits = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
    highest = service.footprint().fds + SPARE_FILES
    clients: list[socket.socket] = []
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (highest, limits[1]))
    try:
        clients = [connect(service) for _ in range(4 * SPARE_FILES)]
        await asyncio.sleep(0.5)
    finally:
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, limits)
        _close(clients)
    began_s = time.monotonic()
    seen = await service.client.stream(stage.oracle.draw())
    stage.result.recovery_s.append(time.monotonic() - began_s)
    stage.result.take(seen, stage.oracle.expected(seen.ask))


def _close(clients: Sequence[socket.socket]) -> None:
    for client in clients:
        client.close()


CLIENT_ROWS: Final = (
    Row(
        name="F15",
        title="client leaves (FIN, RST)",
        trial=leaves,
        load=False,
        rate=1.0 / STEP_S,
        arguments=("--fake-prefill-rate", "1000", "--max-running-requests", "1"),
        bounds_s=(STEP_S + FREED_S, float("inf")),
    ),
    Row(name="F16", title="client does not read", trial=does_not_read, load=False, rate=0.0),
    Row(name="F17", title="malformed HTTP and JSON", trial=nonsense, load=False),
    Row(
        name="F19",
        title=f"{SILENT_CONNECTIONS} silent connections, {FLOOD} requests at once",
        trial=flood,
        load=False,
        rate=1000.0,
        arguments=("--max-running-requests", "8", "--max-queued-requests", str(QUEUE)),
        bounds_s=(REFUSED_S, float("inf")),
    ),
    Row(
        name="F20",
        title="prompt of context + 1, prompt of 10 MiB",
        trial=overlong,
        bounds_s=(REFUSED_S, float("inf")),
    ),
    Row(name="F24", title="no descriptors left", trial=no_descriptors),
)
