"""Addresses for a dp-attention group whose ranks all run on this machine."""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.ports import GroupAddresses
from mlx_dp.proto.wire.curve import make_keys
from mlx_dp.proto.wire.router_socket import check_ipc_path

LOOPBACK: Final = "127.0.0.1"
_IPC: Final = "ipc://"
_LONGEST_NAME: Final = "g2147483647-1023"


class LoopbackAddresses:
    """Free ports of the loopback address, and sockets in the controller's private directory."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint`` is the controller's; the ranks' sockets lie in the directory of its socket.

        Raises ConfigError when their paths would be too long.
        """
        self._ports: tuple[int, ...] = ()
        self._directory: Final = (
            Path(endpoint.removeprefix(_IPC)).parent if endpoint.startswith(_IPC) else None
        )
        if self._directory is not None:
            check_ipc_path(self._directory / _LONGEST_NAME)

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        """See ``AddressSource``. Another program may take a port before the backend binds it."""
        by_port = self._directory is None
        ports = free_ports(2 * size if by_port else size, taken=self._ports)
        self._ports = ports
        return GroupAddresses(
            addresses=tuple(f"{LOOPBACK}:{port}" for port in ports[:size]),
            peers=(
                tuple(f"tcp://{LOOPBACK}:{port}" for port in ports[size:])
                if self._directory is None
                else _paths(self._directory, size, generation)
            ),
            curve=make_keys() if by_port else None,
        )


def free_ports(count: int, *, taken: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Loopback ports that are free at this moment and not in ``taken``."""
    with ExitStack() as stack:
        # All held at once, so that no port is found twice.
        probes = [stack.enter_context(socket.socket()) for _ in range(count + len(taken))]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        found = [int(probe.getsockname()[1]) for probe in probes]
    return tuple([port for port in found if port not in taken][:count])


def _paths(directory: Path, size: int, generation: int) -> tuple[str, ...]:
    for stale in directory.glob("g*-*"):
        # A killed rank leaves its socket behind.
        stale.unlink(missing_ok=True)
    return tuple(f"{_IPC}{directory}/g{generation}-{rank}" for rank in range(size))
