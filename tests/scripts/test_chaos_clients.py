"""The raw clients of scripts/chaos: how they read responses, and their malformed requests."""

import asyncio
import random
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

STREAM = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b'30\r\ndata: {"id":"a","choices":[{"index":0,"text":"fo","finish_reason":null}]}\n\n\r\n'
    b'30\r\ndata: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":"length"}]}\n\n\r\n'
    b'30\r\ndata: {"id":"a","choices":[],'
    b'"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n\r\n'
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\n\r\n{}"


def asked(load: Any, answer: bytes) -> Any:
    """The record of a client whose server sends this response to everything, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def ask() -> Any:
        raw = load("faults.service.raw_client")
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            url = SimpleNamespace(host=host, port=port)
            service = SimpleNamespace(client=SimpleNamespace(http=SimpleNamespace(base_url=url)))
            return await raw.ask_raw(service, raw.plain_ask(random.Random(1), 3))

    return asyncio.run(ask())


def test_a_stream_is_read_event_by_event(load):
    seen = asked(load, STREAM)
    assert (seen.status, seen.text, seen.done, seen.after_done) == (200, "fox", 1, 0)
    assert (seen.ids, seen.finish_reasons, seen.usage) == ({"a"}, ["length"], (4, 3))
    assert not seen.error


def test_a_refusal_keeps_when_to_come_back(load):
    seen = asked(load, REFUSAL)
    assert (seen.status, seen.retry_after) == (429, "7")
    assert seen.error


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n"])
def test_no_answer_and_no_event_are_errors(load, answer):
    assert asked(load, answer).error


def test_what_is_no_http_is_named(load):
    found = list(load("faults.service.nonsense").broken_framing(random.Random(1)))
    assert len({name for name, _ in found}) == len(found) > 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops what comes to a socket")
def test_a_client_without_power_hears_nothing_and_is_not_closed(load):
    raw = load("faults.service.raw_client")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        client.setblocking(False)
        with client, server:
            assert raw.unanswered(client)
            raw.lose_power(client)
            server.sendall(b"are you there?")
            server.close()
            # On the loopback device, any packet that is not dropped has arrived by now.
            assert raw.unanswered(client)
