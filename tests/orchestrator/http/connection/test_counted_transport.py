"""Bytes written to a connection are counted, and everything else passes through."""

import asyncio
from typing import Any, cast

from mlx_dp.orchestrator.http.connection.client_protocol import CountedTransport


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return 7


def test_what_is_written_is_counted_and_passed_on() -> None:
    transport: Any = Transport()
    counted = CountedTransport(cast(asyncio.Transport, transport))
    counted.write(b"abc")
    counted.write(b"de")
    assert counted.written_nbytes == 5
    assert transport.written == [b"abc", b"de"]
    assert counted.get_write_buffer_size() == 7
