"""A host's side of one connection to the controller: time and messages in, what to do out."""

from dataclasses import dataclass
from typing import assert_never

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
    heard_at: float
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

    def due(self, now: float) -> Join | Alive | Lost | None:
        """What to say now, if anything, or that there is nobody to say it to."""
        silent_s = now - self.heard_at
        if silent_s > self.silence_s:
            return Lost(self._silence(silent_s), final=False)
        if self.said_at is not None and now - self.said_at < self.beat_s:
            return None
        self.said_at = now
        return Alive() if self.joined else self.join

    def _silence(self, silent_s: float) -> str:
        said = f"the controller was not heard for {silent_s:.1f} s"
        if self.joined:
            return said
        # A controller that knows other keys closes the connection without a word.
        return f"{said}: it is not there yet, or --keys are not those that it knows"
