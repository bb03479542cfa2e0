"""The connection to the controller, as start-up and loop use it."""

from typing import Protocol

from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.events import Up


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
