"""A client that disconnects frees its slot in every state. Needs real sockets."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import NewTokens, StreamEvent
from mlx_dp.orchestrator.http.preparation.prompt import INLINE_CHARS
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.control.owner_states import READY
from tests.support.http.http_calls import CHAT, HI
from tests.support.http.scripted_service import ScriptedAnswer, ScriptedService, granted
from tests.support.http.served_app import served

pytestmark = pytest.mark.system


async def send(port: int, **body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({"messages": HI, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "events",
    [[], [granted()], [granted(), NewTokens(ids=(65,)), NewTokens(ids=(66,))]],
    ids=["queued", "prefilling", "decoding"],
)
@pytest.mark.parametrize("reset", [False, True])
def test_leaving_cancels_in_every_state(
    events: list[StreamEvent], stream: bool, reset: bool
) -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: events)
        async with asyncio.timeout(20), served(service) as port:
            reader, writer = await send(port, stream=stream, n=2)
            await service.submitted.wait()
            if stream:
                # The headers leave while the request is still queued.
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            if reset:
                writer.transport.abort()
            else:
                writer.close()
            for answer in service.answers:
                await answer.cancelled.wait()
            assert len(service.answers) == 2

    asyncio.run(run())


def test_answer_that_ended_is_not_cancelled_and_the_connection_lives_on() -> None:
    async def run() -> None:
        service = ScriptedService()
        async with asyncio.timeout(20), served(service) as port:
            reader, writer = await send(port, stream=True)
            assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
            content = json.dumps({"messages": HI}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert not any(answer.cancelled.is_set() for answer in service.answers)
            writer.close()

    asyncio.run(run())


def test_stopped_choice_frees_its_slot_while_the_others_run() -> None:
    async def run() -> None:
        service = ScriptedService()
        service.reply = lambda _: [] if service.answers else [granted(), NewTokens(ids=(88,))]
        async with asyncio.timeout(20), served(service) as port:
            _, writer = await send(port, n=2, stop="X")
            await service.submitted.wait()
            await service.answers[0].cancelled.wait()
            assert not service.answers[1].cancelled.is_set()
            writer.close()

    asyncio.run(run())


def test_a_request_that_prepares_leaves_its_place_when_its_client_leaves() -> None:
    going_on = threading.Event()

    class Slow(FakeTextModel):
        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            if len(text) > INLINE_CHARS:
                loop.call_soon_threadsafe(begun.set)
                assert going_on.wait(60)
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def run() -> None:
        nonlocal loop, begun
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        full = replace(READY, running=8)
        service = ScriptedService(owners=(full,))
        service.current = replace(service.current, max_queued_requests=1)
        try:
            async with asyncio.timeout(20), served(service, text=Slow(512)) as port:
                long = [{"role": "user", "content": "x" * (INLINE_CHARS + 1)}]
                _, leaving = await send(port, messages=long)
                await begun.wait()
                reader, writer = await send(port)
                assert b"429" in await reader.readline()
                leaving.close()
                writer.close()
                status = b"429"
                while b"429" in status:
                    reader, writer = await send(port)
                    status = await reader.readline()
                    writer.close()
                assert b"200 OK" in status
        finally:
            going_on.set()

    loop: asyncio.AbstractEventLoop
    begun: asyncio.Event
    asyncio.run(run())


def test_the_probes_of_a_client_that_leaves_are_cancelled() -> None:
    async def run() -> None:
        service = ScriptedService(lambda _: [])
        async with asyncio.timeout(15), served(service) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n")
            await service.submitted.wait()
            writer.close()
            for answer in service.answers:
                await answer.cancelled.wait()
            assert len(service.answers) == 2

    asyncio.run(run())


def test_body_that_is_announced_too_large_is_not_waited_for() -> None:
    async def run() -> None:
        async with asyncio.timeout(20), served(ScriptedService()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: 1000000000\r\n\r\n".encode())
            assert b"413" in await reader.readline()
            await reader.read()
            writer.close()

    asyncio.run(run())


def test_body_that_does_not_arrive_is_refused() -> None:
    async def run() -> None:
        service = ScriptedService()
        options = HttpOptions(served_model_name="m", body_timeout_s=0.05)
        async with asyncio.timeout(20), served(service, options) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b"408" in await reader.readline()
            await reader.read()
            writer.close()
        assert not service.answers

    asyncio.run(run())


def test_bodies_that_drip_in_shut_out_no_client() -> None:
    async def run() -> None:
        service = ScriptedService()
        service.current = replace(service.current, max_queued_requests=2)
        async with asyncio.timeout(20), served(service) as port:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            dripping = []
            for _ in range(40):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                # The server says "continue" as soon as the body is awaited.
                expect = "Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
                writer.write((head + expect).encode())
                assert b"100 Continue" in await reader.readline()
                dripping.append(writer)
            reader, writer = await send(port)
            assert b"200 OK" in await reader.readline()
            for each in [*dripping, writer]:
                each.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /live HTTP/1.1\r\nX-Long: " + b"x" * 100_000, b"431"),
        (b"GET /live HTTP/1.1\r\n\r\n", b"400"),
    ],
    ids=["endless", "no host"],
)
def test_heads_that_are_no_http_are_refused_and_end_their_connection(
    request_head: bytes, status: bytes
) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), served(ScriptedService()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head)
            assert (await reader.readline()).split()[1] == status
            await reader.read()
            writer.close()

    asyncio.run(run())


def test_slow_reader_is_not_read_ahead_of() -> None:
    async def run() -> None:
        consumed = 0

        class Endless(ScriptedAnswer):
            async def __aiter__(self) -> AsyncIterator[StreamEvent]:
                nonlocal consumed
                yield granted()
                while True:
                    consumed += 1
                    yield NewTokens(ids=(65,) * 1000)
                    await asyncio.sleep(0)

        service = ScriptedService()
        service.submit = lambda generation: Endless(0, generation)

        async with asyncio.timeout(30), served(service) as port:
            reader, writer = await send(port, stream=True)
            await reader.readuntil(b"\r\n\r\n")
            # Neither end reads on: the socket buffers fill up, and then the answer must wait.
            before = -1
            while before != consumed:
                before = consumed
                for _ in range(2000):
                    await asyncio.sleep(0)
            assert consumed * 1000 < 20 * 2**20
            writer.transport.abort()

    asyncio.run(run())
