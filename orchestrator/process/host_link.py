"""A host's side of one connection to the controller: time and messages in, what to do out."""

from dataclasses import dataclass
from typing import assert_never

from mlx_dp.orchestrator.process.connection_fault import ControllerPlace, connection_fault
from mlx_dp.proto.connection_state import ConnectionState
from mlx_dp.proto.host_messages import (
    Alive,
    Deny,
    HostDown,
    Join,
    Launch,
    Ping,
    SignalWorker,
    Welcome,
)

FIRST_BEAT_S = 0.5
FIRST_SILENCE_S = 5.0
"""Until the controller has said its own."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is of no more use. ``final``: another would not be either."""

    reason: str
    final: bool


@dataclass(slots=True)
class HostLink:
    """When to speak, and when the controller counts as gone."""

    join: Join
    place: ControllerPlace
    heard_at: float
    had_place: bool = False
    """On an earlier connection, so that keys and address were right once."""
    beat_s: float = FIRST_BEAT_S
    silence_s: float = FIRST_SILENCE_S
    joined: bool = False
    said_at: float | None = None

    def take(self, message: HostDown, now: float) -> Launch | SignalWorker | Lost | None:
        """Take in a message, and return what the host has to do about it."""
        self.heard_at = now
        match message:
            case Welcome(beat_s=beat_s, silence_s=silence_s):
                self.joined, self.beat_s, self.silence_s = True, beat_s, silence_s
                return None
            case Deny(reason=reason, final=final):
                return Lost(reason, final)
            case Ping():
                return None
            case Launch() | SignalWorker():
                return message
            case _:
                assert_never(message)

    def due(self, now: float, connection: ConnectionState) -> Join | Alive | Lost | None:
        """What to say now, if anything, or that there is nobody to say it to."""
        if now - self.heard_at > self.silence_s:
            return self._silence(connection)
        if self.said_at is not None and now - self.said_at < self.beat_s:
            return None
        self.said_at = now
        return Alive() if self.joined else self.join

    def _silence(self, connection: ConnectionState) -> Lost:
        if self.joined:
            reason = f"the controller was not heard for {self.silence_s:g} s"
            return Lost(reason, final=False)
        fault = connection_fault(connection, self.place)
        return Lost(fault.reason, final=fault.lasting and not self.had_place)
