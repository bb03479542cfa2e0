"""The system ends connections whose peers are gone."""

import socket

import pytest

from mlx_dp.orchestrator.http.connection.client_protocol import (
    SEND_BUFFER_NBYTES,
    set_up_client_socket,
)


def test_a_client_that_lost_its_power_is_noticed_by_the_system() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        set_up_client_socket(client, send_timeout_s=30.0)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # Linux doubles what is asked for.
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_NBYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ],
)
def test_silence_and_what_is_not_acknowledged_have_an_end(name: str, value: int) -> None:
    option = getattr(socket, name, None)
    if option is None:
        pytest.skip(f"no {name} here")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        set_up_client_socket(client, send_timeout_s=30.0)
        assert client.getsockopt(socket.IPPROTO_TCP, option) == value
