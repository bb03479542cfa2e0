"""A place in a group: what the decoder refuses, and what logs may show of it."""

from dataclasses import asdict, replace

import msgspec
import pytest

from mlx_dp.proto.capacity.ownership import OwnerSlice
from mlx_dp.proto.capacity.parallel import MAX_OWNERS, ParallelState
from mlx_dp.proto.messages.commands import EngineKind, Start
from mlx_dp.proto.messages.curve_keys import KEY_CHARS, CurveKeys
from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from mlx_dp.proto.wire.codec import decode_down, encode

KEYS = CurveKeys(public="p" * KEY_CHARS, secret="s" * KEY_CHARS)
PLACE = GroupPlace(
    backend=DistributedBackend.RING,
    rank=1,
    size=2,
    addresses=("127.0.0.1:5001", "127.0.0.1:5002"),
    peers=("ipc:///tmp/a/g0-0", "ipc:///tmp/a/g0-1"),
    generation=3,
    curve=KEYS,
    shard_vocabulary=True,
)


def start(group):
    return Start(
        engine=EngineKind.FAKE,
        model_path="",
        share=OwnerSlice(parallel=ParallelState()),
        memory_nbytes=None,
        context_length=None,
        chunked_prefill_size=1,
        prefix_cache=True,
        heartbeat_interval_s=1.0,
        group=group,
    )


@pytest.mark.parametrize("group", [None, PLACE, replace(PLACE, curve=None)])
def test_a_start_brings_the_place_in_the_group(group):
    assert decode_down(encode(start(group))) == start(group)


@pytest.mark.parametrize(
    "bad",
    [
        {"backend": "tcp"},
        {"rank": 2},
        {"rank": -1},
        {"size": 3},
        {"size": 0},
        {"addresses": ["127.0.0.1:5001"]},
        {"peers": ["a", "b", "c"]},
        {"peers": ["a", "b" * 4097]},
        {"size": MAX_OWNERS + 1, "addresses": ["a"] * (MAX_OWNERS + 1), "peers": ["b"] * 65},
        {"generation": 2**31},
        {"generation": -1},
        {"curve": {"public": "p" * KEY_CHARS, "secret": "short"}},
        {"curve": {"public": "p" * (KEY_CHARS + 1), "secret": "s" * KEY_CHARS}},
        {"shard_vocabulary": 1},
    ],
    ids=repr,
)
def test_a_place_that_does_not_add_up_is_refused(bad):
    msgspec.convert(asdict(PLACE), GroupPlace)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**asdict(PLACE), **bad}, GroupPlace)


def test_a_secret_is_not_shown():
    assert KEYS.secret not in repr(start(PLACE))
    assert KEYS.public in repr(start(PLACE))
