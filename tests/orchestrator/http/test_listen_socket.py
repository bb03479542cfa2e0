"""Binding the endpoint, or saying in one sentence why not."""

import socket

import pytest

from mlx_dp.orchestrator.http.listen_socket import (
    bound_port,
    endpoint_url,
    open_socket,
)
from mlx_dp.proto.errors import ConfigError


def test_port_zero_takes_a_free_one() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        assert bound_port(listener) > 0


def test_a_port_in_use_is_refused_at_once() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        port = bound_port(listener)
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            open_socket("127.0.0.1", port)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address of this machine"):
        open_socket("192.0.2.1", 0)


def test_a_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no address of this machine"):
        open_socket("no such host", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_url_works_from_this_machine(host: str, url: str) -> None:
    assert endpoint_url(host, 80) == url


def test_the_protocol_is_named_so_that_asyncio_sends_small_writes_at_once() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
