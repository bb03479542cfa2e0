"""A streaming completion client that costs little, so that a benchmark measures the server.

It speaks HTTP by hand: a general client spends more time on a chunk than a server does.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

REQUEST_TIMEOUT_S = 900.0


class ServerError(Exception):
    """The server answered with an error, or closed the stream before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion. ``prompt_tokens`` is the intended length of the prompt."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    ignore_eos: bool = False


@dataclass(slots=True)
class Stream:
    """Everything that one client received. Times are of this process's monotonic clock."""

    sent_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    owner: int | None = None
    """The owner that the response head names; None from a server without owners."""

    @property
    def first_s(self) -> float:
        """The time of the first text, or of the end when there was none."""
        return self.chunks_s[0] if self.chunks_s else self.ended_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunks_s)]


class Client:
    """Talks to one server; each request has a connection of its own, as with a load balancer."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    async def stream(self, request: Request, seen: Stream | None = None) -> Stream:
        """Run one greedy request to its end, recording into ``seen`` meanwhile.

        Cancelling the task closes the connection at once, like a client that disconnects.
        """
        seen = Stream() if seen is None else seen
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        seen.sent_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(_request("POST", "/v1/completions", json.dumps(body).encode()))
            await asyncio.wait_for(self._read(reader, seen), REQUEST_TIMEOUT_S)
        finally:
            writer.transport.abort()
        seen.ended_s = time.monotonic()
        return seen

    async def _read(self, reader: asyncio.StreamReader, seen: Stream) -> None:
        head = await _head(reader)
        if head.status != 200:
            raise ServerError(f"status {head.status}: {(await reader.read(2000)).decode()}")
        seen.owner = head.owner
        lines = _Lines()
        async for data in _body(reader, chunked=head.chunked):
            now = time.monotonic()
            for line in lines.feed(data):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    _take(json.loads(line[6:]), seen, now)
        raise ServerError(f"the stream ended early, after {len(seen.chunks_s)} chunks")

    async def get_json(self, path: str) -> Any:
        """Return the JSON of a GET, or raise ServerError."""
        return json.loads(await self.get(path))

    async def get(self, path: str) -> bytes:
        """Return the body of a GET, or raise ServerError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(_request("GET", path, b""))
            head = await _head(reader)
            data = b"".join([part async for part in _body(reader, chunked=head.chunked)])
        finally:
            writer.transport.abort()
        if head.status != 200:
            raise ServerError(f"{path}: status {head.status}: {data[:500].decode()}")
        return data


def _request(method: str, path: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The head of a response. ``chunked``: its body comes in chunks."""

    status: int
    chunked: bool
    owner: int | None


async def _head(reader: asyncio.StreamReader) -> _Head:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    owner = re.search(r"^x-dp-rank: *([0-9]+)", head, re.MULTILINE)
    return _Head(
        status=int(head.split(None, 2)[1]),
        chunked="transfer-encoding: chunked" in head,
        owner=int(owner[1]) if owner else None,
    )


async def _body(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the body's bytes as they arrive."""
    if not chunked:
        while data := await reader.read(65536):
            yield data
        return
    while size := int((await reader.readline()).strip() or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


class _Lines:
    """Cuts a stream of bytes into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.rstrip(b"\r") for line in lines]


def _take(event: dict[str, Any], seen: Stream, now: float) -> None:
    if "error" in event:
        raise ServerError(str(event["error"]))
    if usage := event.get("usage"):
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.completion_tokens = usage["completion_tokens"]
    for choice in event["choices"]:
        if text := choice.get("text"):
            seen.text += text
            seen.chunks_s.append(now)


async def run_clients(
    client: Client, requests: Sequence[Request], concurrency: int
) -> list[Stream]:
    """Run the requests with this many clients; each takes the next one when it is done."""
    waiting = list(enumerate(requests))[::-1]
    done: dict[int, Stream] = {}

    async def work() -> None:
        while waiting:
            index, request = waiting.pop()
            done[index] = await client.stream(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return [done[index] for index in sorted(done)]
