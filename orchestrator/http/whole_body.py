"""The body of an answer that is not streamed: made and sent in portions, however large it is."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from starlette.types import Send

PORTION_NBYTES: Final = 64 * 2**10


class WholeBody:
    """Parts that make up one body. Nearly all bodies are a single portion, sent at once."""

    def __init__(self, parts: Sequence[bytes | bytearray]) -> None:
        self._parts = parts
        self.nbytes = sum(map(len, parts))

    @classmethod
    async def collect(cls, parts: Iterable[bytes | bytearray]) -> "WholeBody":
        """Take the parts, which are made meanwhile, and let others run after each large one."""
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
                # A client that reads fast enough never makes ``send`` wait.
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
