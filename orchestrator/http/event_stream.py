"""Server-sent events: starts the response once, and sends keep-alives while idle."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from starlette.types import Send

from mlx_dp.orchestrator.openai.api_format import StreamWriter

# A response without an owner waits this long before it starts: until then a failure still has its
# own status, and an owner that is about to have room is named in the headers.
GRANT_GRACE_S: Final = 0.1

_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """One response of server-sent events. Writes from several tasks do not mix."""

    def __init__(self, send: Send, writer: StreamWriter, keep_alive_s: float) -> None:
        self._send = send
        self._writer = writer
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._written_at = 0.0
        self._ticked = False
        self.started = False
        self.headers: list[tuple[bytes, bytes]] = []
        """Added to the response's own, if set before it starts."""

    async def start(self) -> None:
        """Send status and headers, unless they are sent."""
        async with self._lock:
            await self._start()

    async def write(self, events: bytes) -> None:
        async with self._lock:
            await self._start()
            await self._body(events, more=True)

    async def close(self, events: bytes) -> None:
        async with self._lock:
            await self._start()
            await self._body(events, more=False)

    async def tick(self) -> float:
        """For ``while_connected``: start after the grace, then send keep-alives while idle."""
        if not self._ticked:
            self._ticked = True
            return GRANT_GRACE_S
        await self.start()
        idle_s = time.monotonic() - self._written_at
        if idle_s < self._keep_alive_s:
            return self._keep_alive_s - idle_s
        await self.write(self._writer.keep_alive())
        return self._keep_alive_s

    async def _start(self) -> None:
        if self.started:
            return
        self.started = True
        self._written_at = time.monotonic()
        headers: Sequence[tuple[bytes, bytes]] = [*_HEADERS, *self.headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if opening := self._writer.start():
            await self._body(opening, more=True)

    async def _body(self, events: bytes, *, more: bool) -> None:
        self._written_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": more})
