"""The messages of controller and hosts, as frames."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down, Shutdown
from mlx_dp.proto.messages.events import Hello, Up
from mlx_dp.proto.messages.host_messages import HostDown, HostUp, Ping, host_identity, is_host
from mlx_dp.proto.wire.codec import decode_down, decode_host_down, decode_host_up, decode_up, encode
from tests.support.control.message_strategies import of_class, unbounded_fields

KINDS = (*get_args(HostDown), *get_args(HostUp))


@given(st.one_of([of_class(kind) for kind in get_args(HostDown)]))
def test_what_goes_down_is_read_as_it_was_said(message) -> None:
    assert decode_host_down(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_host_up(encode(message))


@given(st.one_of([of_class(kind) for kind in get_args(HostUp)]))
def test_what_goes_up_is_read_as_it_was_said(message) -> None:
    assert decode_host_up(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_host_down(encode(message))


def test_hosts_and_workers_are_not_taken_for_each_other() -> None:
    with pytest.raises(ProtocolError):
        decode_down(encode(Ping()))
    with pytest.raises(ProtocolError):
        decode_host_down(encode(Shutdown()))
    with pytest.raises(ProtocolError):
        decode_host_up(encode(Hello(pid=1)))
    tags = [kind.tag for kind in (*KINDS, *get_args(Down), *get_args(Up))]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize("kind", KINDS)
def test_every_length_is_bounded(kind) -> None:
    assert unbounded_fields(kind) == []


@given(st.binary(max_size=200))
def test_nonsense_is_a_protocol_error(frame) -> None:
    for decode in (decode_host_down, decode_host_up):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_a_host_is_known_by_its_identity_and_a_worker_is_no_host() -> None:
    assert is_host(host_identity(3, 255).encode())
    assert host_identity(3, 255) == "host-3-00000000000000ff"
    assert not is_host(b"w3-00000000000000ff")
    assert decode_up(encode(Hello(pid=1))) == Hello(pid=1)
