"""Frames that strangers send to the workers' socket: garbage, and forged worker events."""

import random
from collections.abc import Iterator
from typing import Final

import msgspec

from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Hello,
    Prefilled,
    Ready,
    TokenChunk,
    Tokens,
    Up,
)
from mlx_dp.proto.wire.codec import PROTOCOL_VERSION, encode

EPOCHS: Final = (1, 2)
"""Ids of a request that was granted once, and of one whose worker was lost."""
FORGED_TOKEN: Final = ord("X")

_SHAPE: Final = ModelShape(
    num_layers=1,
    attention_layers=1,
    auxiliary_layers=0,
    kv_bytes_per_token=64,
    auxiliary_bytes_per_slot=0,
    vocab_size=512,
    context_length=8192,
    weights_nbytes=1,
)
_CAPACITY: Final = OwnerCapacity(request_slots=64, auxiliary_slots=0, pool_tokens=100_000)


def garbage(rng: random.Random) -> Iterator[list[bytes]]:
    """Yield malformed messages."""
    yield [b""]
    yield [rng.randbytes(rng.randint(1, 5000))]
    yield [b"\xdd\xff\xff\xff\xff"]
    yield [b"\xc0" * rng.randint(1, 100_000)]
    yield [b"\x80", b"\x80"]
    yield [b"x"] * 100
    yield [msgspec.msgpack.encode((PROTOCOL_VERSION + 1, Hello.tag, Hello(pid=1)))]


def forgeries(request_ids: range) -> Iterator[list[bytes]]:
    """Yield well-formed events of a worker about itself and about these requests."""
    yield from ([encode(message)] for message in _of_itself())
    for request_id in request_ids:
        for epoch in EPOCHS:
            yield from ([encode(message)] for message in _of_request(request_id, epoch))


def _of_itself() -> Iterator[Up]:
    yield Hello(pid=1)
    yield Ready(capacity=_CAPACITY, shape=_SHAPE, context_length=8192, device="forged", load_s=0.0)
    yield Failed(kind=FailureKind.OUT_OF_MEMORY, message="forged")


def _of_request(request_id: int, epoch: int) -> Iterator[Up]:
    yield Accepted(request_id=request_id, epoch=epoch, slot=0)
    yield Prefilled(request_id=request_id, epoch=epoch, cached_tokens=0)
    for index in range(2):
        chunk = TokenChunk(request_id=request_id, epoch=epoch, index=index, ids=(FORGED_TOKEN,))
        yield Tokens(chunks=(chunk,))
    yield Finished(request_id=request_id, epoch=epoch, reason=FinishReason.STOP, num_tokens=2)
