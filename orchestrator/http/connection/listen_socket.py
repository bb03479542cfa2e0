"""The server's listening socket, bound before anything slow begins."""

import errno
import socket
import struct
from types import MappingProxyType
from typing import Final

from mlx_dp.proto.errors import ConfigError

_BACKLOG: Final = 2048
"""The system caps it: at 4096 on Linux, at 128 on macOS."""
_CONNECT_TIMEOUT_S: Final = 0.5
_ANY_ADDRESS: Final = MappingProxyType(
    {"0.0.0.0": ("127.0.0.1",), "::": ("127.0.0.1", "::1")},
)


def open_socket(host: str, port: int) -> socket.socket:
    """Bind and listen. Raises ConfigError.

    It listens at once: on Linux two servers could otherwise both bind the port, and fail only
    after both have loaded. Connections wait in the backlog until the server runs.
    """
    family, address = _resolve(host, port)
    if port and _is_served(str(address[0]), port):
        raise ConfigError(_in_use(host, port))
    # asyncio sets TCP_NODELAY only where the protocol is named. Without it the second small write
    # of an answer waits for the client's delayed acknowledgement: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_reason(host, port, error)) from error
    listener.setblocking(False)
    return listener


def bound_port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def endpoint_url(host: str, port: int) -> str:
    """Return an address that clients on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{reachable}]" if ":" in reachable else reachable
    return f"http://{shown}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host!r} is not an address of this machine ({error}): use 127.0.0.1 for "
            "loopback only, or 0.0.0.0 for all networks"
        ) from error
    # "localhost" may have both families; all clients try IPv4.
    found.sort(key=lambda entry: entry[0] is not socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, address


def _is_served(address: str, port: int) -> bool:
    """Whether another server listens where clients of this address would arrive.

    macOS lets one user bind 127.0.0.1 and 0.0.0.0 to the same port, and gives each connection to
    the more specific one, so a successful bind proves nothing.
    """
    return any(_connects(each, port) for each in _ANY_ADDRESS.get(address, (address,)))


def _connects(address: str, port: int) -> bool:
    try:
        # From the address itself, so that no other machine is reached.
        with socket.create_connection(
            (address, port), timeout=_CONNECT_TIMEOUT_S, source_address=(address, 0)
        ) as knock:
            if knock.getsockname() != knock.getpeername():
                return True
            # The system picked the free port for this end too: the socket is connected to itself.
            # A reset keeps the port out of TIME_WAIT.
            knock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
    except OSError:
        return False


def _in_use(host: str, port: int) -> str:
    return (
        f"port {port} on {host} is in use: stop what listens there, or choose another --port "
        "(0 takes a free one)"
    )


def _reason(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return _in_use(host, port)
        case errno.EACCES:
            return f"port {port} needs root privileges: use a --port above 1023"
        case errno.EADDRNOTAVAIL:
            return (
                f"--host {host} is not an address of this machine: use 127.0.0.1 for loopback "
                "only, or 0.0.0.0 for all networks"
            )
        case _:
            return f"cannot listen on {host}, port {port}: {error.strerror}"
