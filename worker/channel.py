"""The connection to the controller, and a buffer for commands that arrive during a step."""

from typing import Final, Protocol

from mlx_dp.proto.messages.commands import Down, Shutdown
from mlx_dp.proto.messages.events import Up
from mlx_dp.worker.contract.peers import PassEndedError

_MAX_BUFFERED: Final = 1_024
"""Beyond this, ``listen`` reads nothing more, and the controller's own queue fills up."""


class Channel(Protocol):
    """Sends events and receives commands. Owned by one thread."""

    @property
    def congested(self) -> bool:
        """Whether frames wait because the controller does not read."""

    @property
    def malformed_frames(self) -> int:
        """Frames from the controller that were dropped because they broke the protocol."""

    def send(self, message: Up) -> None: ...

    def drain(self) -> list[Down]: ...

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        """Block until a message is there (True), the descriptor ``beside`` is readable, or the
        time is up.
        """


class ShutdownRequestedError(PassEndedError):
    """The controller sent Shutdown while a step waited for a peer."""


class BufferedChannel:
    """A channel that can be read in the middle of a step.

    Shutdown takes effect at once; other commands are kept for the next ``drain``, in order.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buffered: list[Down] = []

    @property
    def congested(self) -> bool:
        return self._channel.congested

    @property
    def malformed_frames(self) -> int:
        return self._channel.malformed_frames

    def send(self, message: Up) -> None:
        self._channel.send(message)

    def drain(self) -> list[Down]:
        buffered, self._buffered = self._buffered, []
        return buffered + self._channel.drain()

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        if self._buffered:
            return True
        if beside is None:
            return self._channel.wait(timeout_s)
        return self._channel.wait(timeout_s, beside)

    def listen(self) -> None:
        """Read and buffer the commands that have arrived. Raises ShutdownRequestedError."""
        if len(self._buffered) >= _MAX_BUFFERED:
            return
        commands = self._channel.drain()
        self._buffered += commands
        if any(isinstance(command, Shutdown) for command in commands):
            raise ShutdownRequestedError("the controller sent Shutdown")
