"""Streamed responses: each piece as an event at once; an error after the start is an event too."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from fastapi import Response
from starlette.types import Receive, Scope, Send

from mlx_dp.orchestrator.formats.common.api_format import ChoiceEnd, StreamWriter
from mlx_dp.orchestrator.formats.common.errors import ApiError, internal_error
from mlx_dp.orchestrator.http.connection.while_connected import ClientGoneError, while_connected
from mlx_dp.orchestrator.http.stream.choice_streams import ChoiceStreams
from mlx_dp.orchestrator.text.choice_text import Piece

logger = logging.getLogger(__name__)

# A response waits this long for an owner before it starts. Until then a failure can still have its
# own status, and the headers can name an owner that is about to have room.
GRANT_GRACE_S: Final = 0.1

_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """One response of server-sent events. Starts once, and sends keep-alives while idle.

    Several tasks may write: each write is sent whole.
    """

    def __init__(self, send: Send, writer: StreamWriter, keep_alive_s: float) -> None:
        self._send = send
        self._writer = writer
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._written_at = 0.0
        self._ticked = False
        self.started = False
        self.headers: list[tuple[bytes, bytes]] = []
        """Further headers. They must be set before the response starts."""

    async def start(self) -> None:
        """Send status and headers, unless that is done."""
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
        """Start after the grace, then send keep-alives while idle. See ``while_connected``."""
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


class StreamedResponse(Response):
    """Runs the choices and sends the writer's events of them.

    A client that disconnects cancels them.
    """

    def __init__(
        self, streams: ChoiceStreams, writer: StreamWriter, *, keep_alive_s: float
    ) -> None:
        super().__init__()
        self._streams = streams
        self._writer = writer
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._writer, self._keep_alive_s)
        try:
            self._streams.submit()
            await while_connected(receive, self._run(stream), tick=stream.tick)
        except ClientGoneError:
            if not stream.started:
                raise
        except ApiError as error:
            if not stream.started:
                raise
            await stream.close(self._writer.failure(error))
        except Exception:
            if not stream.started:
                raise
            # If the stream just ended, the client would take it for a network failure.
            logger.exception("a stream broke")
            await stream.close(self._writer.failure(internal_error()))
        finally:
            self._streams.cancel()

    async def _run(self, stream: EventStream) -> None:
        await self._streams.run(_StreamSink(stream, self._writer, self._streams))
        await stream.close(self._writer.end(self._streams.usage()))


class _StreamSink:
    """Writes each piece as an event, after the opening of its choice.

    The headers are sent at the grant, before the first token. If a proxy got both at once, it would
    write them one after the other, and the second write would wait 40 ms for the acknowledgement
    of the first. A comment names the owners if the headers were sent before they were known, or if
    they changed.
    """

    def __init__(self, stream: EventStream, writer: StreamWriter, streams: ChoiceStreams) -> None:
        self._stream = stream
        self._writer = writer
        self._streams = streams
        self._opened: set[int] = set()
        self._named: list[tuple[bytes, bytes]] = []

    async def granted(self) -> None:
        serving = self._streams.rank_headers()
        if not self._stream.started:
            self._stream.headers = self._named = serving
            # With several choices, the headers wait for the owners of all, up to the grace.
            if self._streams.all_granted:
                await self._stream.start()
        elif serving != self._named:
            self._named = serving
            await self._stream.write(_rank_comment(serving))

    async def piece(self, index: int, piece: Piece) -> None:
        await self._stream.write(self._opening(index) + self._piece(index, piece))

    async def close(self, index: int, piece: Piece, end: ChoiceEnd) -> None:
        events = self._opening(index)
        if piece:
            events += self._piece(index, piece)
        await self._stream.write(events + self._writer.closing(index, end))

    def _piece(self, index: int, piece: Piece) -> bytes:
        return self._writer.piece(index, piece, self._streams.completion_tokens(index))

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._writer.opening(index)


def _rank_comment(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the rank headers as a comment line, for a stream whose headers have been sent."""
    return b": " + b" ".join(name + b": " + value for name, value in headers) + b"\n\n"
