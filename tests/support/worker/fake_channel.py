"""A worker's channel of two lists, and a clock that only waiting moves."""

from typing import TypeVar

from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.events import Up

_Kind = TypeVar("_Kind", bound=Up)


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeChannel:
    """Hands over what a test queues, and keeps what is sent. A wait lasts its full time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.commands: list[Down] = []
        self.sent: list[Up] = []
        self.congested = False
        self.malformed_frames = 0
        self.waits: list[float] = []

    def send(self, message: Up) -> None:
        self.sent.append(message)

    def drain(self) -> list[Down]:
        commands, self.commands = self.commands, []
        return commands

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        self.waits.append(timeout_s)
        self._time.sleep(timeout_s)
        return False

    def sent_of(self, kind: type[_Kind]) -> list[_Kind]:
        return [message for message in self.sent if isinstance(message, kind)]

    def take(self) -> list[Up]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent
