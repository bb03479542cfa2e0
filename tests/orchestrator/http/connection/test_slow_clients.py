"""Clients that send slowly, read slowly, or not at all. Real sockets, short limits."""

import asyncio
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import NewTokens, StreamEvent
from mlx_dp.orchestrator.http.connection import server
from mlx_dp.orchestrator.http.connection.client_protocol import ClientProtocol
from tests.support.http.http_calls import CHAT, HI
from tests.support.http.scripted_service import OPTIONS, ScriptedAnswer, ScriptedService, granted
from tests.support.http.served_app import served

pytestmark = pytest.mark.system

HURRIED = replace(
    OPTIONS, head_timeout_s=0.05, body_timeout_s=0.05, idle_timeout_s=0.05, send_timeout_s=0.5
)
DEADLINE_S = 200
SET_UP = f"{ClientProtocol.__module__}.set_up_client_socket"


@pytest.fixture(autouse=True)
def swept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep at each tick, and give a body no second more for the route that reads it."""
    monkeypatch.setattr(server, "_TICKS_A_SWEEP", 1)
    monkeypatch.setattr(server, "_BODY_GRACE_S", 0.1)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a byte at a time, for ever, until the peer closes."""
    try:
        while True:
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.01)
    except ConnectionError:
        return


async def until_closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1000):
            continue
    except ConnectionError:
        return


@pytest.mark.parametrize(
    "sent", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nHost: x\r\n"], ids=["no", "line", "host"]
)
def test_a_head_that_does_not_come_ends_its_connection(sent: bytes) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService(), HURRIED) as port:
            reader, writer = await connect(port)
            writer.write(sent)
            told = await reader.read()
            assert told.startswith(b"HTTP/1.1 408 ")
            assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["param"] is None
            writer.close()

    asyncio.run(run())


def test_a_head_that_drips_gains_no_time() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService(), HURRIED) as port:
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.1\r\nX: ")
            dripping = asyncio.create_task(drip(writer, b"x"))
            assert b"408" in await reader.readline()
            await dripping
            writer.close()

    asyncio.run(run())


def test_a_second_head_that_drips_is_no_idle_connection() -> None:
    async def run() -> None:
        options = replace(HURRIED, idle_timeout_s=1000)
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService(), options) as port:
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b'"alive"' in await reader.readuntil(b"}")
            dripping = asyncio.create_task(drip(writer, b"GET /live HTTP/1.1\r\nX: " + b"x" * 999))
            assert b"408" in await reader.readline()
            await dripping
            writer.close()

    asyncio.run(run())


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted()])
        async with asyncio.timeout(DEADLINE_S), served(service, HURRIED) as port:
            content = json.dumps({"messages": HI, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            busy_reader, busy = await connect(port)
            busy.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            await busy_reader.readuntil(b"\r\n\r\n")
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            # It ends unprompted, and by then the other one has waited longer.
            assert b"200 OK" in await reader.read()
            assert not service.answers[0].cancelled.is_set()
            assert not busy_reader.at_eof()
            busy.close()
            writer.close()

    asyncio.run(run())


def test_a_body_that_no_route_reads_ends_its_connection() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService(), HURRIED) as port:
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n")
            dripping = asyncio.create_task(drip(writer, b"x"))
            assert b"200 OK" in await reader.readline()
            await until_closed(reader)
            dripping.cancel()
            writer.close()

    asyncio.run(run())


class Endless(ScriptedAnswer):
    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        yield granted()
        while not self.cancelled.is_set():
            yield NewTokens(ids=(65,) * 1000)
            await asyncio.sleep(0)


@pytest.mark.parametrize("by_system", [True, False])
def test_a_client_that_reads_nothing_is_dropped_and_its_slot_freed(
    by_system: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_system:
        # Some systems close the connection themselves, others do not, so we do it too.
        monkeypatch.setattr(SET_UP, lambda *_, **__: None)

    async def run() -> None:
        service = ScriptedService()
        made: list[Endless] = []

        def submit(generation: object) -> Endless:
            made.append(Endless(0, generation))
            return made[-1]

        service.submit = submit
        async with asyncio.timeout(DEADLINE_S), served(service, HURRIED) as port:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            content = json.dumps({"messages": HI, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            await loop.sock_sendall(
                client, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
            )
            while not made:
                await asyncio.sleep(0)
            await made[0].cancelled.wait()
            client.close()

    asyncio.run(run())


def test_a_connection_too_many_takes_the_place_of_one_that_waits() -> None:
    async def run() -> None:
        options = replace(OPTIONS, max_connections=3)
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService(), options) as port:
            opened = [await connect(port) for _ in range(10)]
            reader, writer = opened[-1]
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readline()
            for gone, _ in opened[:7]:
                assert await gone.read() == b""
            for _, each in opened:
                each.close()

    asyncio.run(run())


def test_a_connection_too_many_is_told_so_when_none_is_idle() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted()])
        options = replace(OPTIONS, max_connections=2)
        async with asyncio.timeout(DEADLINE_S), served(service, options) as port:
            content = json.dumps({"messages": HI, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            busy = [await connect(port) for _ in range(2)]
            for reader, writer in busy:
                writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                await reader.readuntil(b"\r\n\r\n")
            reader, writer = await connect(port)
            told = await reader.read()
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: " in told
            assert not any(answer.cancelled.is_set() for answer in service.answers)
            for _, each in [*busy, (reader, writer)]:
                each.close()

    asyncio.run(run())


BAD_REQUESTS = {
    "negative length": (b"Content-Length: -1", b"400"),
    "two lengths": (b"Content-Length: 1\r\nContent-Length: 2", b"400"),
    "length of no digits": (b"Content-Length: 0x10", b"400"),
    "length and chunks": (b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"400"),
    "gzip transfer": (b"Transfer-Encoding: gzip", b"501"),
    "two hosts": (b"Host: y", b"400"),
    "folded header": (b"X: 1\r\n 2", b"200"),
    "space before colon": (b"X : 1", b"400"),
    "control character": (b"X: a\x00b", b"400"),
    "bare line feed in a name": (b"X\n: 1", b"400"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_requests_that_servers_read_differently_are_refused(name: str) -> None:
    header, status = BAD_REQUESTS[name]

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService()) as port:
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n0\r\n\r\n")
            assert (await reader.readline()).split()[1] == status
            if status != b"200":
                assert b'{"error":{"message":' in await reader.read()
            writer.close()

    asyncio.run(run())


def test_http_1_0_has_no_chunks() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService()) as port:
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
            told = await reader.read()
            assert b" 400 " in told
            assert b"needs HTTP/1.1" in told
            writer.close()

    asyncio.run(run())


def test_chunks_that_are_none_are_refused_and_reach_no_route() -> None:
    async def run() -> None:
        service = ScriptedService()
        async with asyncio.timeout(DEADLINE_S), served(service) as port:
            reader, writer = await connect(port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n".encode())
            await writer.drain()
            writer.write(b"-1\r\nx\r\n0\r\n\r\n")
            told = await reader.read()
            assert told.count(b"content-length") == 1
            assert b" 400 " in told
            writer.close()
        assert not service.answers

    asyncio.run(run())


def test_a_client_that_leaves_during_a_response_frees_its_place() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted()])
        options = replace(OPTIONS, max_connections=2)
        content = json.dumps({"messages": HI, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with asyncio.timeout(DEADLINE_S), served(service, options) as port:
            for _ in range(3):
                busy = [await connect(port) for _ in range(2)]
                for reader, writer in busy:
                    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                for _, writer in busy:
                    writer.close()
                for answer in service.answers:
                    await answer.cancelled.wait()

    asyncio.run(run())


def test_a_head_of_one_packet_is_bounded_too() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService()) as port:
            reader, writer = await connect(port)
            many = b"".join(b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(70))
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")
            assert b"431" in await reader.readline()
            await reader.read()
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_sends_early_is_seen_to_leave(leaves: bool) -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted()])
        async with asyncio.timeout(DEADLINE_S), served(service) as port:
            reader, writer = await connect(port)
            content = json.dumps({"messages": HI, "stream": True}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            await reader.readuntil(b"\r\n\r\n")
            if leaves:
                writer.write(b"\x00garbage")
                writer.close()
            else:
                # No client needs to send so much so early.
                writer.write(b"x" * 1_000_000)
            await service.answers[0].cancelled.wait()
            writer.close()

    asyncio.run(run())


def test_a_request_that_comes_early_is_answered_next() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), served(ScriptedService()) as port:
            reader, writer = await connect(port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 5)
            for _ in range(5):
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.close()

    asyncio.run(run())


class Told(logging.Handler):
    """Reports when the server has complained, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.once = asyncio.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.once.set()


def test_out_of_descriptors_clients_wait_and_the_log_stays_short() -> None:
    async def run() -> None:
        told = Told()
        logger = logging.getLogger("mlx_dp.orchestrator.http.connection.server")
        logger.addHandler(told)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            async with asyncio.timeout(DEADLINE_S), served(ScriptedService()) as port:
                # The loop's own descriptors exist once it has served a client.
                _, first = await connect(port)
                client = socket.socket()
                client.setblocking(False)
                free = os.dup(client.fileno())
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, ("127.0.0.1", port))
                await told.once.wait()
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                await loop.sock_sendall(client, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200 OK" in await loop.sock_recv(client, 1000)
                client.close()
                first.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            logger.removeHandler(told)
        assert len(told.messages) == 1
        assert "no connection can be accepted" in told.messages[0]

    asyncio.run(run())
