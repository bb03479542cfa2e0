"""Why the controller cannot be reached, as a sentence with a remedy."""

from dataclasses import dataclass
from typing import assert_never

from mlx_dp.proto.wire.connection_state import ConnectionState


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerPlace:
    """The address of the controller. ``keys``: the directory given as --keys, or empty."""

    endpoint: str
    keys: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionFault:
    """``lasting``: retrying is useless until the keys or the address change."""

    reason: str
    lasting: bool


def connection_fault(state: ConnectionState, place: ControllerPlace) -> ConnectionFault:
    """Derive the fault from the connection state of a controller that does not answer."""
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
