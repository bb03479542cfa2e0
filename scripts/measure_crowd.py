"""Many open connections that say nothing, and many streams at once."""

import argparse
import asyncio
import resource
import socket
import time
from typing import Final

from bench_client import Client, Request, quantile, run_clients
from bench_report import mebibytes, milliseconds
from chaos_client import MODEL
from chaos_client_rows import address
from chaos_service import ChaosService
from chaos_stage import Row, Settings, Stage
from measure_garbage import Peak
from measure_value import Measured

TOKENS: Final = 20
STEPS_PER_S: Final = 2.0
PER_CONNECTION: Final = 64 * 1024
"""What an open connection may cost. A stream may cost as much again for its text."""
SPARE_FDS: Final = 1000
CONNECT_AT_A_TIME: Final = 200


async def measure_crowd(options: argparse.Namespace) -> list[Measured]:
    """What the controller's memory grows by, and whether each stream comes to its end."""
    _raise_open_files(options.idle + options.streams + SPARE_FDS)
    settings = Settings(
        trials=1, seed=options.seed, model=None, workers=options.workers, streams=1, slack=1.0
    )
    row = Row(name="crowd", title="", trial=_nothing, rate=STEPS_PER_S)
    service = Stage(row, settings).new_service(
        *("--max-queued-requests", str(options.streams), "--hang-timeout", "30")
    )
    idle: list[socket.socket] = []
    try:
        await service.start()
        before = service.footprint().rss_nbytes
        idle = await _connect(service, options.idle)
        with_idle = service.footprint().rss_nbytes
        peak = Peak(service)
        streams = asyncio.create_task(_stream(service, options.streams))
        failed = await peak.during(_failures(streams))
        took_s = streams.result()[1]
        alive_s = await _answer_s(service)
        deaths = service.deaths(0)
        closed = sum(_closed(client) for client in idle)
    finally:
        for client in idle:
            client.close()
        await service.stop()
    return [
        Measured.bounded(
            f"RSS growth for {options.idle} idle connections",
            with_idle - before,
            options.idle * PER_CONNECTION,
            mebibytes,
        ),
        Measured.bounded(
            f"RSS growth for {options.streams} streams beside them",
            peak.rss_nbytes - with_idle,
            2 * options.streams * PER_CONNECTION,
            mebibytes,
        ),
        Measured.bounded(f"closed of {options.idle} idle connections", closed, 0, str),
        Measured.bounded(f"failed of {options.streams} streams", failed, 0, str),
        Measured(f"time of a stream of {TOKENS} tokens, p50", milliseconds(quantile(took_s, 0.5))),
        Measured(f"time of a stream of {TOKENS} tokens, p99", milliseconds(quantile(took_s, 0.99))),
        Measured("/live beside the idle connections", milliseconds(alive_s)),
        Measured.bounded("workers lost", deaths, 0, str),
    ]


async def _nothing(_stage: Stage) -> None:
    """This measure has no trials."""


def _raise_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


async def _connect(service: ChaosService, count: int) -> list[socket.socket]:
    """Open connections, no more at a time than the backlog takes.

    Each has asked once, as one that says nothing at all is closed early.
    """
    clients: list[socket.socket] = []
    while len(clients) < count:
        batch = [socket.socket() for _ in range(min(CONNECT_AT_A_TIME, count - len(clients)))]
        clients += batch
        for client in batch:
            client.setblocking(False)
        await asyncio.gather(*(_open(client, address(service)) for client in batch))
    return clients


async def _open(client: socket.socket, place: tuple[str, int]) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, place)
    await loop.sock_sendall(client, b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = await loop.sock_recv(client, 4096)
    assert answer.startswith(b"HTTP/1.1 200"), answer


def _closed(client: socket.socket) -> bool:
    """Whether the service has hung up, behind what is left of its answer."""
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


async def _stream(service: ChaosService, count: int) -> tuple[int, list[float]]:
    """Return how many failed, and how long the others took."""
    client = Client(address(service)[1], MODEL)
    request = Request(prompt="Hi", prompt_tokens=2, max_tokens=TOKENS)
    took_s: list[float] = []

    async def one() -> bool:
        [seen] = await run_clients(client, [request], 1)
        took_s.append(seen.ended_s - seen.sent_s)
        return seen.completion_tokens == TOKENS

    ended = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    return sum(each is not True for each in ended), took_s


async def _failures(streams: "asyncio.Task[tuple[int, list[float]]]") -> int:
    failed, _ = await streams
    return failed


async def _answer_s(service: ChaosService) -> float:
    began_s = time.monotonic()
    (await service.client.http.get("/live")).raise_for_status()
    return time.monotonic() - began_s
