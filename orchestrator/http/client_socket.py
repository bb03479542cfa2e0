"""Socket options of client connections, so that a dead or stuck peer is noticed."""

import socket
from typing import Final

# The kernel would grow this to megabytes for each client that does not read.
SEND_BUFFER_NBYTES: Final = 128 * 2**10

_FIRST_PROBE_S: Final = 15
_NEXT_PROBE_S: Final = 5
_PROBES: Final = 3
# Linux and macOS name this option differently.
_SECONDS_OF_SILENCE: Final = ("TCP_KEEPIDLE", "TCP_KEEPALIVE")


def set_up_client_socket(client: socket.socket, *, send_timeout_s: float) -> None:
    """Bound the send buffer, and let the system end a connection whose peer is gone.

    A client that loses power sends no FIN, and would keep its request's slot. Keep-alive probes
    notice it while nothing is sent, and missing acknowledgements while something is.
    """
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in _SECONDS_OF_SILENCE:
        _set(client, name, _FIRST_PROBE_S)
    _set(client, "TCP_KEEPINTVL", _NEXT_PROBE_S)
    _set(client, "TCP_KEEPCNT", _PROBES)
    _set(client, "TCP_USER_TIMEOUT", round(1000 * send_timeout_s))


def _set(client: socket.socket, name: str, value: int) -> None:
    option: int | None = getattr(socket, name, None)
    if option is not None:
        client.setsockopt(socket.IPPROTO_TCP, option, value)
