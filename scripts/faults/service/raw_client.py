"""Clients on bare sockets, which leave, fall silent or do not read; and cheap ones.

A general client spends milliseconds on a request, and cannot misbehave.
"""

import asyncio
import ctypes
import json
import random
import socket
import struct
import time
from collections.abc import Iterable

from scripts.faults.service.client import Ask, Seen
from scripts.faults.service.process import ChaosService, ServiceError

FIRST_EVENT_S = 30.0
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)


def plain_ask(rng: random.Random, max_tokens: int, *, rank: int | None = None) -> Ask:
    """A streamed completion of a prompt that was not sent before."""
    return Ask(prompt=f"plain {rng.getrandbits(64):016x}", max_tokens=max_tokens, rank=rank)


def address(service: ChaosService) -> tuple[str, int]:
    url = service.client.http.base_url
    assert url.port is not None
    return url.host, url.port


def http_request(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def raw_stream(ask: Ask) -> bytes:
    return http_request(json.dumps(ask.body()).encode())


def connect(service: ChaosService, *, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(address(service))
    client.setblocking(False)
    return client


def asking(service: ChaosService, asks: Iterable[Ask]) -> list[socket.socket]:
    """Connections that have each sent a request, and have read nothing."""
    clients = []
    for ask in asks:
        client = connect(service)
        client.sendall(raw_stream(ask))
        clients.append(client)
    return clients


async def first_event(client: socket.socket) -> None:
    """Read until the response has begun."""
    got = b""
    async with asyncio.timeout(FIRST_EVENT_S):
        while b"data: " not in got:
            more = await asyncio.get_running_loop().sock_recv(client, 1024)
            if not more:
                raise ServiceError(f"no stream began: {got!r}")
            got += more


def unanswered(client: socket.socket) -> bool:
    """Whether nothing has arrived, not even the end of the connection."""
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


def close(clients: Iterable[socket.socket]) -> None:
    for client in clients:
        client.close()


def reset_at_close(client: socket.socket) -> None:
    """Close the connection with RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def lose_power(client: socket.socket) -> None:
    """Make the system drop incoming packets, so that this connection never answers its peer."""
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    filter_of_one = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_of_one)


async def ask_raw(service: ChaosService, ask: Ask) -> Seen:
    """Run a request to its end, and record the response; ``chunks_s`` stays empty."""
    seen = Seen(ask, sent_s=time.monotonic())
    try:
        reader, writer = await asyncio.open_connection(*address(service))
        try:
            writer.write(raw_stream(ask))
            answer = await reader.read()
        finally:
            writer.transport.abort()
    except OSError as error:
        seen.error = f"{type(error).__name__}: {error}"
    else:
        _read_answer(seen, answer.decode())
    seen.ended_s = time.monotonic()
    return seen


def _read_answer(seen: Seen, answer: str) -> None:
    head, _, body = answer.partition("\r\n\r\n")
    line, *fields = head.lower().split("\r\n")
    if not line:
        seen.error = "closed without an answer"
        return
    seen.status = int(line.split()[1])
    seen.retry_after = dict(field.split(": ", 1) for field in fields).get("retry-after", "")
    if seen.status != 200:
        seen.error = body
        return
    # Chunk sizes come between the events, on lines of their own.
    for event in (line[6:] for line in body.splitlines() if line.startswith("data: ")):
        seen.after_done += seen.done
        if event == "[DONE]":
            seen.done += 1
        else:
            _read_event(seen, json.loads(event))


def _read_event(seen: Seen, event: dict[str, object]) -> None:
    match event:
        case {"error": error}:
            seen.error = str(error)
        case {"id": str() as name, "choices": list() as choices}:
            seen.ids.add(name)
            for choice in choices:
                seen.texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    seen.finish_reasons.append(choice["finish_reason"])
            if isinstance(usage := event.get("usage"), dict):
                seen.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        case _:
            seen.error = f"no event of a completion: {event}"
