"""No input makes the decoder do anything but return a message or raise ProtocolError."""

import struct
from dataclasses import asdict
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.events import Up
from mlx_dp.proto.wire.codec import MAX_FRAME_BYTES, decode_down, decode_up, encode
from tests.support.control import message_strategies

KINDS = get_args(Down | Up)

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))
messages = st.one_of([message_strategies.of_class(kind) for kind in KINDS])


def refuse(data: bytes) -> None:
    for decode in (decode_down, decode_up):
        with pytest.raises(ProtocolError):
            decode(data)


def accept_or_refuse(data: bytes) -> None:
    for decode in (decode_down, decode_up):
        try:
            message = decode(data)
        except ProtocolError:
            continue
        assert decode(encode(message)) == message


@given(st.binary(max_size=200))
@relaxed
def test_random_bytes_are_refused(data):
    accept_or_refuse(data)


@given(message=messages, cut=st.floats(0, 1, exclude_max=True))
@relaxed
def test_truncated_frames_are_refused(message, cut):
    whole = encode(message)
    refuse(whole[: int(cut * len(whole))])


@given(message=messages, junk=st.binary(min_size=1, max_size=8))
@relaxed
def test_trailing_bytes_are_refused(message, junk):
    refuse(encode(message) + junk)


@given(message=messages, flips=st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
@relaxed
def test_flipped_bits_never_crash_the_decoder(message, flips):
    data = bytearray(encode(message))
    for flip in flips:
        data[flip // 8 % len(data)] ^= 1 << flip % 8
    accept_or_refuse(bytes(data))


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
trees = st.recursive(
    scalars | st.binary(max_size=8) | st.builds(msgspec.msgpack.Ext, st.just(1), st.binary()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(kind=st.sampled_from(KINDS), data=st.data())
@relaxed
def test_any_tree_in_place_of_any_field_is_taken_as_valid_or_refused(kind, data):
    message = data.draw(message_strategies.of_class(kind))
    fields = asdict(message)
    if fields:
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(trees)
    accept_or_refuse(msgspec.msgpack.encode((1, kind.tag, fields)))


@given(version=trees, tag=trees, fields=trees)
@relaxed
def test_any_tree_in_place_of_the_header_is_refused(version, tag, fields):
    accept_or_refuse(msgspec.msgpack.encode((version, tag, fields)))


@pytest.mark.parametrize("depth", [500, 100_000, 4_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
def test_deep_nesting_is_refused(depth, opening):
    depth = min(depth, (MAX_FRAME_BYTES - 100) // len(opening))
    nested = opening * depth + b"\xc0"
    refuse(nested)
    refuse(b"\x93\x01" + msgspec.msgpack.encode("tokens") + nested)
    refuse(b"\x93\x01" + msgspec.msgpack.encode("tokens") + b"\x81\xa6chunks" + nested)
    refuse(b"\x93\x01" + msgspec.msgpack.encode("abort") + b"\x81\xa1x" + nested)


@pytest.mark.parametrize("opening", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_lengths_beyond_the_frame_are_refused(opening):
    huge = opening + struct.pack(">I", 2**32 - 1)
    refuse(huge)
    for tag, name in (("tokens", "chunks"), ("submit", "prompt_ids"), ("failed", "message")):
        refuse(b"\x93\x01" + msgspec.msgpack.encode(tag) + huge)
        refuse(
            b"\x93\x01"
            + msgspec.msgpack.encode(tag)
            + b"\x81"
            + msgspec.msgpack.encode(name)
            + huge
        )
