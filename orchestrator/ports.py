"""Ports: the protocols by which the control plane reaches processes, the channel and the network.

``process`` and ``proto`` implement them; tests have fakes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.curve_keys import CurveKeys
from mlx_dp.proto.messages.events import Up


class WorkerProcess(Protocol):
    """One child process. No method waits, and all do nothing once the child has exited.

    No method sends SIGTERM: workers ignore it, since systemd sends it to every process of a
    service.
    """

    @property
    def pid(self) -> int: ...

    @property
    def halted(self) -> bool:
        """Whether it was stopped by a signal and not continued, as far as the system tells."""

    def abort(self) -> None:
        """Make the child write its stacks to the log. It may survive that; ``kill`` follows."""

    def kill(self) -> None:
        """Send SIGKILL to the whole process group of the child."""


class Launcher(Protocol):
    """Starts worker processes that connect to an endpoint under a given identity."""

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """Start worker ``index``.

        ``on_exit`` runs once, in the event loop and never inside this call, as soon as the child
        has exited; its argument is the exit status, or the negated signal number. Raises OSError
        when no process could be started.
        """


class Transport(Protocol):
    """Messages to and from workers by identity. Sends are not acknowledged."""

    @property
    def endpoint(self) -> str: ...

    @property
    def unknown_frames(self) -> int: ...

    def expect(self, identity: str) -> None:
        """Deliver events of this identity from now on."""

    def forget(self, identity: str) -> None:
        """Deliver no event of this identity any more."""

    def send(self, identity: str, message: Down) -> None:
        """Raises NotConnectedError, PeerCongestedError or ProtocolError; then nothing was sent."""

    def drain(self) -> list[tuple[str, Up | ProtocolError]]: ...

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        """Call ``on_arrival`` from the loop whenever there may be something to drain."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddresses:
    """The addresses of a group, as in ``GroupPlace``, in the order of ranks."""

    addresses: tuple[str, ...]
    peers: tuple[str, ...]
    curve: CurveKeys | None = None


class AddressSource(Protocol):
    """Finds the addresses at which the ranks of a group meet, new ones for each start."""

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        """Return addresses that are free now, and that no earlier generation has used.

        Called when no process of an earlier generation is left. Raises OSError when there are none.
        """
