"""The wire to the controller, as start-up and loop see it."""

from typing import Protocol

from mlx_dp.proto.messages.protocol import Down, Up


class Channel(Protocol):
    """Owned by one thread."""

    @property
    def congested(self) -> bool:
        """The controller does not read, and frames wait for it."""

    @property
    def malformed_frames(self) -> int:
        """Frames from the controller that were dropped, since they broke the protocol."""

    def send(self, message: Up) -> None: ...

    def drain(self) -> list[Down]: ...

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        """Block until a message is there (True), the descriptor ``beside`` can be read, or the
        time is up."""
