"""What the controller needs of its channel; the ROUTER socket has it, tests have fakes."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages import Down, Up


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
