"""Binding the endpoint, or one sentence with the reason."""

import socket

import pytest

from mlx_dp.orchestrator.http.connection.listen_socket import (
    bound_port,
    endpoint_url,
    open_socket,
)
from mlx_dp.proto.errors import ConfigError

MODULE = open_socket.__module__


def test_port_zero_takes_a_free_one() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        assert bound_port(listener) > 0


def test_a_port_in_use_is_refused_at_once() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        port = bound_port(listener)
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            open_socket("127.0.0.1", port)


class BindsSideBySide(socket.socket):
    """Binds without a conflict, as one user may on macOS: here, to another port."""

    def bind(self, address: tuple[object, ...], /) -> None:
        super().bind((address[0], 0, *address[2:]))


@pytest.mark.parametrize(
    ("taken", "wanted"),
    [
        ("127.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", "::"),
        ("::1", "::"),
    ],
)
def test_a_port_in_use_is_seen_where_binding_does_not_see_it(
    monkeypatch: pytest.MonkeyPatch, taken: str, wanted: str
) -> None:
    if ":" in taken + wanted and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with open_socket(taken, 0) as listener:
        port = bound_port(listener)
        monkeypatch.setattr(f"{MODULE}.socket.socket", BindsSideBySide)
        with pytest.raises(ConfigError, match=f"port {port} on {wanted} is in use"):
            open_socket(wanted, port)


def test_a_port_that_was_just_left_is_free() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        port = bound_port(listener)
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listener.accept()
            served.close()
            client.recv(1)
    with open_socket("127.0.0.1", port) as again:
        assert bound_port(again) == port


def test_a_connection_with_itself_is_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_itself(address: tuple[str, int], timeout: float, **_: object) -> socket.socket:
        made = socket.socket()
        made.settimeout(timeout)
        made.bind(address)
        made.connect(address)
        return made

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(f"{MODULE}.socket.create_connection", with_itself)
    with open_socket("127.0.0.1", port) as listener:
        assert bound_port(listener) == port


@pytest.mark.parametrize("port", [0, 8000])
def test_a_foreign_address_is_refused_and_not_called(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: tuple[str, int]) -> None:
        assert address[0] != "192.0.2.1"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine"):
        open_socket("192.0.2.1", port)


def test_a_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an address of this machine"):
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
