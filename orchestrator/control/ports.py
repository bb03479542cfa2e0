"""Ports: what the control plane needs of processes, of the wire and of the network.

The controller process has the real ones; tests have fakes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mlx_dp.proto.curve_keys import CurveKeys
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages import Down, Up


class WorkerProcess(Protocol):
    """One child. Every method is a no-op once the child has exited, and none of them waits.

    There is no SIGTERM: workers ignore it, since systemd and others send it to all of a service.
    """

    @property
    def pid(self) -> int: ...

    @property
    def halted(self) -> bool:
        """It was stopped by a signal, and not continued since, as far as the system tells."""

    def abort(self) -> None:
        """The child writes its stacks to the log. It may live on: ``kill`` follows."""

    def kill(self) -> None:
        """SIGKILL to the child's whole process group."""


class Launcher(Protocol):
    """Starts worker processes that connect to an endpoint under a given identity."""

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """Start worker ``index``.

        ``on_exit`` runs once, in the event loop and never inside this call, as soon as the child
        has exited; its argument is the exit status, or the negated signal number. Raises OSError
        when no process could be made.
        """


class Transport(Protocol):
    """Messages to and from workers by identity. A send acknowledges nothing."""

    @property
    def endpoint(self) -> str: ...

    @property
    def unknown_frames(self) -> int: ...

    def expect(self, identity: str) -> None:
        """Hear this identity from now on."""

    def forget(self, identity: str) -> None:
        """Never hear this identity again."""

    def send(self, identity: str, message: Down) -> None:
        """Raises PeerLostError, PeerCongestedError or ProtocolError; then nothing was sent."""

    def drain(self) -> list[tuple[str, Up | ProtocolError]]: ...

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        """Call ``on_arrival`` from the loop whenever there may be something to drain."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddresses:
    """As in ``GroupPlace``, in the order of ranks."""

    addresses: tuple[str, ...]
    peers: tuple[str, ...]
    curve: CurveKeys | None = None


class AddressBook(Protocol):
    """Finds addresses for a group; this machine has them, tests have fakes."""

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        """Addresses that are free now, none of them of an earlier generation.

        Called once no process of an earlier generation is left. Raises OSError when there are
        none to be had.
        """
