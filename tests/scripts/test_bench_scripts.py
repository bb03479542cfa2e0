"""The benchmarks' client reads streams correctly."""

import asyncio
import json

import pytest


@pytest.fixture
def client(load):
    return load("benchmarks.serving.client")


def event(text: str, **more: object) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text}], **more})}\n\n".encode()


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
BODY = event("a") + b": keepalive\n\n" + event("b") + event("", usage=USAGE) + b"data: [DONE]\n\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def run(client, answer: bytes):
    """One request to a server that sends this response and closes."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main():
        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            request = client.Request(prompt="x", prompt_tokens=1, max_tokens=2)
            return await client.Client(port, "m").stream(request)

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_cut_anywhere_by_chunks_are_read(client, size):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    seen = run(client, head + chunked(BODY, size))
    assert (seen.text, len(seen.chunks_s), seen.completion_tokens) == ("ab", 2, 2)


def test_a_stream_that_ends_with_its_connection_is_read(client):
    seen = run(client, b"HTTP/1.0 200 OK\r\n\r\n" + BODY)
    assert (seen.text, seen.prompt_tokens) == ("ab", 3)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n" + event("a"), id="ended early"),
        pytest.param(b"HTTP/1.1 429 Too Many\r\n\r\n{}", id="refused"),
        pytest.param(b'HTTP/1.0 200 OK\r\n\r\ndata: {"error": "x"}\n\n', id="failed in the stream"),
    ],
)
def test_a_failed_request_is_never_counted_as_served(client, answer):
    with pytest.raises(client.ServerError):
        run(client, answer)
