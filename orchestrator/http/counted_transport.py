"""A transport that counts the bytes written to it."""

import asyncio
from typing import Any


class CountedTransport:
    """asyncio tells only the size of its buffer, which hides how much the client has read."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written_nbytes = 0

    def write(self, data: bytes) -> None:
        self.written_nbytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
