"""No frame, valid or not, costs more memory than a small multiple of its size."""

import tracemalloc
from collections.abc import Callable, Mapping
from typing import Final

import pytest

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.fields import MAX_REQUEST_TOKENS
from mlx_dp.proto.wire.codec import MAX_FRAME_BYTES, decode_down, decode_up

RATIO = 32
"""One byte that encodes a float becomes an object of 24 bytes and a reference of 8."""


def text(value: str) -> bytes:
    return b"\xd9" + bytes([len(value)]) + value.encode()


def array(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def filled(head: bytes, item: bytes, tail: bytes = b"") -> bytes:
    """A head, its array of as many items as a frame and the largest bound allow, a tail."""
    count = min((MAX_FRAME_BYTES - len(head) - len(tail) - 5) // len(item), MAX_REQUEST_TOKENS)
    return head + array(count) + item * count + tail


def frame(tag: str, *names: str) -> bytes:
    """The start of a frame, down to the value of a field within fields."""
    return b"\x93\x01" + text(tag) + b"".join(b"\x81" + text(name) for name in names)


TOP = b"\x82" + text("logprob") + b"\x00" + text("top") + array(20) + b"\x92\x00\x00" * 20
CHUNK = b"\x85" + b"".join(text(name) + b"\x00" for name in ("request_id", "epoch", "index"))
SMALLEST = b"\x84" + CHUNK[1:] + text("ids") + b"\x91\x00"
LOGPROBS = 20_000

CASES: Final[Mapping[str, Callable[[], bytes]]] = {
    "empty arrays": lambda: array(MAX_FRAME_BYTES - 5) + b"\x90" * (MAX_FRAME_BYTES - 5),
    "empty arrays as chunks": lambda: filled(frame("tokens", "chunks"), b"\x90"),
    "empty maps as chunks": lambda: filled(frame("tokens", "chunks"), b"\x80"),
    "empty maps in an unknown field": lambda: filled(frame("tokens", "x"), b"\x80"),
    "small ids": lambda: filled(frame("submit", "prompt_ids"), b"\x00"),
    "ids": lambda: filled(frame("submit", "prompt_ids"), b"\xce\x00\x01\x00\x00"),
    "biases": lambda: filled(frame("submit", "params", "logit_bias"), b"\x92\x00\x00"),
    "short texts": lambda: filled(frame("ready", "capacity", "warnings"), b"\xa2ab"),
    "nothing where texts belong": lambda: filled(frame("ready", "capacity", "warnings"), b"\xc0"),
    "smallest chunks": lambda: filled(frame("tokens", "chunks"), SMALLEST),
    "log-probabilities": lambda: (
        frame("tokens", "chunks")
        + array(1)
        + CHUNK
        + (text("ids") + array(LOGPROBS) + b"\x00" * LOGPROBS)
        + (text("logprobs") + array(LOGPROBS) + TOP * LOGPROBS)
    ),
}
"""Made in the test: each has as many bytes as a frame may have."""


def peak_nbytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        for decode in (decode_down, decode_up):
            try:
                decode(data)
            except ProtocolError:
                continue
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", CASES)
def test_memory_stays_within_a_small_multiple_of_the_frame(case):
    data = CASES[case]()
    assert len(data) <= MAX_FRAME_BYTES
    ratio = peak_nbytes(data) / len(data)
    print(f"{case}: {ratio:.1f} times the frame")
    assert ratio < RATIO
