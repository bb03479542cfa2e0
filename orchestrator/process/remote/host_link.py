"""A host's side of one connection to the controller. Pure: time and messages in, actions out."""

from dataclasses import dataclass
from typing import assert_never

from mlx_dp.proto.messages.host_messages import (
    Alive,
    Deny,
    HostDown,
    Join,
    Launch,
    Ping,
    SignalWorker,
    Welcome,
)
from mlx_dp.proto.wire.connection_state import ConnectionState

FIRST_HEARTBEAT_S = 0.5
FIRST_SILENCE_S = 5.0
"""The intervals until the controller sends its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerPlace:
    """The address of the controller. ``keys``: the directory given as --keys, or empty."""

    endpoint: str
    keys: str = ""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection is useless. ``final``: another one would be useless too."""

    reason: str
    final: bool


@dataclass(slots=True)
class HostLink:
    """Decides when to send a message, and when the controller counts as lost."""

    join: Join
    place: ControllerPlace
    heard_at: float
    had_place: bool = False
    """Whether an earlier connection was accepted, so keys and address were right then."""
    heartbeat_s: float = FIRST_HEARTBEAT_S
    silence_s: float = FIRST_SILENCE_S
    joined: bool = False
    said_at: float | None = None

    def handle(self, message: HostDown, now: float) -> Launch | SignalWorker | LinkLost | None:
        """Apply a message; return the action for the host, if any."""
        self.heard_at = now
        match message:
            case Welcome(heartbeat_s=heartbeat_s, silence_s=silence_s):
                self.joined, self.heartbeat_s, self.silence_s = True, heartbeat_s, silence_s
                return None
            case Deny(reason=reason, final=final):
                return LinkLost(reason, final)
            case Ping():
                return None
            case Launch() | SignalWorker():
                return message
            case _:
                assert_never(message)

    def poll(self, now: float, connection: ConnectionState) -> Join | Alive | LinkLost | None:
        """Return the message that is due, or the loss of a silent controller."""
        if now - self.heard_at > self.silence_s:
            return self._silence(connection)
        if self.said_at is not None and now - self.said_at < self.heartbeat_s:
            return None
        self.said_at = now
        return Alive() if self.joined else self.join

    def _silence(self, connection: ConnectionState) -> LinkLost:
        if self.joined:
            reason = f"the controller was not heard for {self.silence_s:g} s"
            return LinkLost(reason, final=False)
        fault = connection_fault(connection, self.place)
        return LinkLost(fault.reason, final=fault.lasting and not self.had_place)


@dataclass(frozen=True, slots=True)
class ConnectionFault:
    """Why the controller cannot be reached, as a sentence with a remedy.

    ``lasting``: retrying is useless until the keys or the address change.
    """

    reason: str
    lasting: bool


def connection_fault(state: ConnectionState, place: ControllerPlace) -> ConnectionFault:
    """Explain, with a remedy, why a controller in this connection state does not answer."""
    endpoint, keys = place.endpoint, place.keys
    match state:
        case ConnectionState.UNREACHED:
            return ConnectionFault(
                f"nothing listens at --controller {endpoint}: start mlx-dp serve there with that "
                "address as --dist-init-addr, or check the address and the firewall",
                lasting=False,
            )
        case ConnectionState.GREETING | ConnectionState.READY:
            return ConnectionFault(
                f"the controller at {endpoint} does not answer: see its log", lasting=False
            )
        case ConnectionState.KEY_REFUSED:
            return ConnectionFault(
                f"the controller at {endpoint} does not know the worker's key in --keys {keys}: "
                "copy its .pub file to the directory that serve has as --keys, and start serve "
                "again, or copy a key from there",
                lasting=True,
            )
        case ConnectionState.OTHER_MECHANISM if keys:
            return ConnectionFault(
                f"the controller at {endpoint} has no keys, and --keys {keys} was given: leave "
                "it out, or start serve with --keys",
                lasting=True,
            )
        case ConnectionState.BROKEN_OFF if keys:
            return ConnectionFault(
                f"what listens at {endpoint} is not the controller of controller.pub in --keys "
                f"{keys}: copy controller.pub from the directory that serve has as --keys, or "
                "check the address",
                lasting=True,
            )
        case ConnectionState.BROKEN_OFF | ConnectionState.OTHER_MECHANISM:
            return ConnectionFault(
                f"the controller at {endpoint} wants keys, or it is none: give the directory with "
                "controller.pub and this worker's key as --keys, or check the address",
                lasting=True,
            )
        case _:
            assert_never(state)
