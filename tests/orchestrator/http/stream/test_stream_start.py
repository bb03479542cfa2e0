"""When a stream's status and headers are sent, and where they name the owners."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens, Started
from mlx_dp.orchestrator.http.stream.streamed_response import EventStream
from mlx_dp.proto.messages.events import FinishReason
from tests.support.http.http_calls import CHAT, HI
from tests.support.http.scripted_service import ScriptedService, granted, says
from tests.support.http.served_app import served

DEADLINE_S = 30.0
GRACE = f"{EventStream.__module__}.GRANT_GRACE_S"


class Client:
    """A raw connection that records arriving data, piece by piece."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)

    async def ask(self, **fields: object) -> None:
        body = json.dumps({"messages": HI, "stream": True, **fields}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        await asyncio.get_running_loop().sock_sendall(self._socket, request)

    async def segment(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, 65536)

    async def until(self, end: bytes) -> bytes:
        seen = b""
        while end not in seen:
            data = await self.segment()
            assert data, f"the connection ended after {seen!r}"
            seen += data
        return seen

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def asking(service: ScriptedService, **fields: object) -> AsyncIterator[Client]:
    async with asyncio.timeout(DEADLINE_S), served(service) as port:
        client = Client(port)
        try:
            await client.ask(**fields)
            await service.submitted.wait()
            yield client
        finally:
            client.close()


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream starts by its grant or its first event, and never because time has passed."""
    monkeypatch.setattr(GRACE, 2 * DEADLINE_S)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without an owner starts at once."""
    monkeypatch.setattr(GRACE, 0.0)


def head(data: bytes) -> dict[str, str]:
    """The headers of a segment that holds nothing else."""
    text, _, rest = data.decode().partition("\r\n\r\n")
    assert rest == "", rest
    status, *lines = text.split("\r\n")
    assert status == "HTTP/1.1 200 OK", data
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.usefixtures("no_grace")
def test_headers_leave_at_the_grant_in_a_segment_of_their_own() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted(1, "total_tokens")])
        async with asking(service) as client:
            headers = head(await client.segment())
            assert (headers["x-dp-rank"], headers["x-routing-reason"]) == ("1", "total_tokens")
            service.answers[0].feed(says("x")[1:])
            events = await client.until(b"[DONE]")
        assert b"HTTP/1.1" not in events
        assert b"x-dp-rank" not in events

    asyncio.run(run())


@pytest.mark.usefixtures("no_grace")
def test_headers_of_several_choices_name_the_owners_of_all() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted(len(service.answers))])
        async with asking(service, n=3) as client:
            assert head(await client.segment())["x-dp-rank"] == "0,1,2"

    asyncio.run(run())


@pytest.mark.usefixtures("no_grace")
def test_choices_of_one_owner_start_at_the_last_grant() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [granted()])
        async with asking(service, n=2) as client:
            assert head(await client.segment())["x-dp-rank"] == "0"

    asyncio.run(run())


@pytest.mark.usefixtures("no_wait")
def test_a_stream_that_waited_names_its_owner_in_a_comment_at_the_grant() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [])
        async with asking(service) as client:
            assert "x-dp-rank" not in head(await client.segment())
            service.answers[0].feed([granted(1, "total_tokens")])
            named = await client.until(b"\n\n")
            assert b": x-dp-rank: 1 x-routing-reason: total_tokens\n\n" in named
            service.answers[0].feed(says("x", owner=1)[1:])
            assert b"x-dp-rank" not in await client.until(b"[DONE]")

    asyncio.run(run())


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(("owner", "told"), [(1, 1), (0, 0)])
def test_a_stream_that_moves_names_its_new_owner(owner: int, told: int) -> None:
    events = [
        granted(0, "total_tokens"),
        Started(cached_tokens=0),
        NewTokens(ids=(65,)),
        granted(owner, "total_tokens"),
        NewTokens(ids=(66,)),
        Ended(reason=FinishReason.LENGTH),
    ]

    async def run() -> None:
        async with asking(ScriptedService(lambda _: events)) as client:
            stream = await client.until(b"[DONE]")
        assert stream.count(b"\r\nx-dp-rank: 0\r\n") == 1
        assert stream.count(b": x-dp-rank: ") == told
        assert stream.count(b": x-dp-rank: 1 x-routing-reason: total_tokens\n\n") == told

    asyncio.run(run())


@pytest.mark.usefixtures("no_grace")
def test_what_fails_after_the_grant_is_an_event() -> None:
    failed = Ended(reason=FinishReason.ERROR, message="no", code="rejected_invalid", status=400)

    async def run() -> None:
        service = ScriptedService(lambda _: [granted(), failed])
        async with asking(service) as client:
            stream = await client.until(b"[DONE]")
        assert stream.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"code":"rejected_invalid"' in stream

    asyncio.run(run())


@pytest.mark.usefixtures("no_grace")
def test_what_fails_before_the_grant_has_its_status() -> None:
    failed = Ended(reason=FinishReason.ERROR, message="late", code="queue_timeout", status=503)

    async def run() -> None:
        async with asking(ScriptedService(lambda _: [failed])) as client:
            assert (await client.until(b"}}")).startswith(b"HTTP/1.1 503 ")

    asyncio.run(run())
