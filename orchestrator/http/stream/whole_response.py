"""Responses that are not streamed: one body once all choices are complete, or one error."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from fastapi import Response
from starlette.types import Receive, Scope, Send

from mlx_dp.orchestrator.formats.common.api_format import ChoiceEnd, WholeWriter
from mlx_dp.orchestrator.http.connection.while_connected import while_connected
from mlx_dp.orchestrator.http.stream.choice_streams import ChoiceStreams
from mlx_dp.orchestrator.text.choice_text import Piece

PORTION_NBYTES: Final = 64 * 2**10


class WholeResponse(Response):
    """Runs the choices and sends the writer's body of them.

    A client that disconnects cancels them.
    """

    def __init__(self, streams: ChoiceStreams, writer: WholeWriter) -> None:
        super().__init__()
        self._streams = streams
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._streams.submit()
            body = await while_connected(receive, self._run())
        finally:
            self._streams.cancel()
        await body.send(send, self._streams.rank_headers())

    async def _run(self) -> "WholeBody":
        await self._streams.run(_WriterSink(self._writer))
        return await WholeBody.collect(self._writer.body(self._streams.usage()))


class _WriterSink:
    """Passes the pieces to a writer. Nothing is sent before the end."""

    def __init__(self, writer: WholeWriter) -> None:
        self._writer = writer

    async def granted(self) -> None:
        return

    async def piece(self, index: int, piece: Piece) -> None:
        self._writer.piece(index, piece)

    async def close(self, index: int, piece: Piece, end: ChoiceEnd) -> None:
        self._writer.piece(index, piece)
        self._writer.closing(index, end)


class WholeBody:
    """The parts of one body, made and sent in portions. Nearly all bodies are a single portion."""

    def __init__(self, parts: Sequence[bytes | bytearray]) -> None:
        self._parts = parts
        self.nbytes = sum(map(len, parts))

    @classmethod
    async def collect(cls, parts: Iterable[bytes | bytearray]) -> "WholeBody":
        """Make the parts by iterating over them, and let other tasks run after each large one."""
        found: list[bytes | bytearray] = []
        for part in parts:
            found.append(part)
            if len(part) > PORTION_NBYTES:
                await asyncio.sleep(0)
        return cls(found)

    async def send(self, send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send all of it as a response with status 200."""
        named = [
            (b"content-length", str(self.nbytes).encode()),
            (b"content-type", b"application/json"),
            *headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": named})
        left = self.nbytes
        for portion in self._portions():
            left -= len(portion)
            await send({"type": "http.response.body", "body": portion, "more_body": left > 0})
            if left:
                # Let other tasks run: ``send`` does not wait while the client reads fast enough.
                await asyncio.sleep(0)

    def _portions(self) -> Iterator[bytes]:
        gathered = bytearray()
        for part in self._parts:
            with memoryview(part) as view:
                for at in range(0, len(part), PORTION_NBYTES):
                    gathered += view[at : at + PORTION_NBYTES]
                    if len(gathered) >= PORTION_NBYTES:
                        yield bytes(gathered)
                        gathered = bytearray()
        if gathered:
            yield bytes(gathered)
