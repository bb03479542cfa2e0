"""Many idle connections and many concurrent streams."""

import argparse
import asyncio
import resource
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from scripts.benchmarks.results.report import mebibytes, milliseconds, quantile
from scripts.benchmarks.serving.client import Client, Request
from scripts.faults.service.client import MODEL
from scripts.faults.service.process import ChaosService
from scripts.faults.service.raw_client import address
from scripts.faults.trials.stage import Row, Settings, Stage
from scripts.measuring.garbage import Peak
from scripts.measuring.value import Measured

TOKENS: Final = 20
STEPS_PER_S: Final = 1.0
PER_CONNECTION: Final = 64 * 1024
"""The bound per open connection. A stream may cost as much again for its text."""
SPARE_FDS: Final = 1000
CONNECT_AT_A_TIME: Final = 200
LIVE_S: Final = 0.1
SLACK: Final = 3.0
"""The crowd's clients use as much CPU as the service does."""
LIVE_PROGRAM: Final = Path(__file__).with_name("live.py")
SAMPLE_S: Final = 0.2
IDLE_S: Final = 3.0


async def measure_crowd(options: argparse.Namespace) -> list[Measured]:
    """Measure the growth of the controller's memory, and whether each stream completes."""
    _raise_open_files(options.idle + options.streams + SPARE_FDS)
    settings = Settings(
        trials=1, seed=options.seed, model=None, workers=options.workers, streams=1, slack=1.0
    )
    row = Row(name="crowd", title="", trial=_nothing, rate=STEPS_PER_S)
    service = Stage(row, settings).new_service(
        # All are granted at once, so that all stream at once.
        *("--max-running-requests", str(options.streams)),
        *("--max-queued-requests", str(options.streams), "--hang-timeout", "30"),
    )
    idle: list[socket.socket] = []
    try:
        await service.start()
        before = service.footprint().rss_nbytes
        idle = await _connect(service, options.idle)
        with_idle = service.footprint().rss_nbytes
        peak = Peak(service)
        crowd = Crowd(service)
        async with LiveTimes(service) as beside_streams:
            failed = await peak.during(crowd.stream(options.streams))
        async with LiveTimes(service) as beside_idle:
            await asyncio.sleep(IDLE_S)
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
        Measured.bounded("workers lost", deaths, 0, str),
        *crowd.measured(options.streams),
        beside_streams.measured("the streams", SLACK),
        beside_idle.measured("the idle connections", 1.0),
    ]


async def _nothing(_stage: Stage) -> None:
    """This measure has no trials."""


def _raise_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


async def _connect(service: ChaosService, count: int) -> list[socket.socket]:
    """Open connections, at most a backlog of them at once.

    Each sends one request, since the service closes silent connections early.
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
    """Whether the service has closed the connection, after the rest of its response."""
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


class Crowd:
    """Concurrent streams, and the service's response times to other requests meanwhile."""

    def __init__(self, service: ChaosService) -> None:
        self._service: Final = service
        self._client: Final = Client(address(service)[1], MODEL)
        self._took_s: Final[list[float]] = []
        self._most_running = 0

    async def stream(self, count: int) -> int:
        """Return the number of failed streams."""
        looking = asyncio.create_task(self._look())
        try:
            ended = await asyncio.gather(
                *(self._one() for _ in range(count)), return_exceptions=True
            )
        finally:
            looking.cancel()
            await asyncio.wait({looking})
        if not looking.cancelled():
            # The process ends by itself only when the service did not answer.
            looking.result()
        causes = Counter(repr(each) for each in ended if isinstance(each, BaseException))
        for cause, streams in causes.items():
            print(f"{streams} streams: {cause}", file=sys.stderr)
        return sum(each is not True for each in ended)

    async def _one(self) -> bool:
        request = Request(prompt="Hi", prompt_tokens=2, max_tokens=TOKENS)
        seen = await self._client.stream(request)
        self._took_s.append(seen.ended_s - seen.sent_s)
        return seen.completion_tokens == TOKENS

    async def _look(self) -> None:
        while True:
            loads = await self._service.get("/v1/loads")
            self._most_running = max(self._most_running, loads["aggregate"]["num_running_reqs"])
            await asyncio.sleep(SAMPLE_S)

    def measured(self, streams: int) -> list[Measured]:
        """The results of ``streams`` streams."""
        text = f"time of a stream of {TOKENS} tokens"
        most = self._most_running
        return [
            Measured("most streams at once", str(most), f">= {streams}", most >= streams),
            Measured(f"{text}, p50", milliseconds(quantile(self._took_s, 0.5))),
            Measured(f"{text}, p99", milliseconds(quantile(self._took_s, 0.99))),
        ]


class LiveTimes:
    """Response times of /live, measured by a separate process."""

    def __init__(self, service: ChaosService) -> None:
        self._service: Final = service
        self._seconds: list[float] = []

    async def __aenter__(self) -> "LiveTimes":
        host, port = address(self._service)
        self._program = await asyncio.create_subprocess_exec(
            *(sys.executable, str(LIVE_PROGRAM), host, str(port)), stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._program.returncode is None:
            self._program.terminate()
        output = (await self._program.communicate())[0]
        self._seconds = [float(line) for line in output.decode().splitlines()]

    def measured(self, beside: str, slack: float) -> Measured:
        """Check the p99. A request without a response has no sample, and exceeds the bound."""
        ended_itself = self._program.returncode != -signal.SIGTERM
        p99_s = float("nan") if ended_itself else quantile(self._seconds, 0.99)
        text = f"/live beside {beside}, p99 of {len(self._seconds)}"
        return Measured.bounded(text, p99_s, slack * LIVE_S, milliseconds)
