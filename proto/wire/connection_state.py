"""The progress of a connection, as ZeroMQ's monitor reports it."""

from collections.abc import Mapping
from enum import Enum, auto, unique
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message


@unique
class ConnectionState(Enum):
    """The latest known state of one end's attempts to connect."""

    UNREACHED = auto()
    """No listener accepted the connection."""
    GREETING = auto()
    """The connection is open, but the handshake is not complete."""
    READY = auto()
    KEY_REFUSED = auto()
    """The other end does not know our key."""
    OTHER_MECHANISM = auto()
    """One end has keys, and the other has none."""
    BROKEN_OFF = auto()
    """The other end closed the connection at our greeting: its key is not the one we expect, or it
    is another program. If it has keys and we have none, this may be seen instead of
    OTHER_MECHANISM.
    """


_STATES: Final[Mapping[int, ConnectionState]] = {
    zmq.EVENT_CONNECTED: ConnectionState.GREETING,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionState.READY,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionState.KEY_REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionState.OTHER_MECHANISM,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionState.BROKEN_OFF,
    # After a failed handshake this event is its consequence; alone it means that nothing listens.
    zmq.EVENT_CLOSED: ConnectionState.UNREACHED,
}
_FAILED: Final = (
    ConnectionState.KEY_REFUSED,
    ConnectionState.OTHER_MECHANISM,
    ConnectionState.BROKEN_OFF,
)


class ConnectionMonitor:
    """Follows one socket's connection. Make it before the socket connects; ``close`` it first."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._watched: Final = socket
        self._events: Final = socket.get_monitor_socket(zmq.EVENT_ALL)
        self._state = ConnectionState.UNREACHED

    @property
    def state(self) -> ConnectionState:
        """The present state. A failed handshake stays known while another is tried."""
        while self._events.poll(0):
            new = _STATES.get(int(recv_monitor_message(self._events)["event"]))
            tried_again = new is ConnectionState.GREETING and self._state in _FAILED
            if new is not None and not tried_again:
                self._state = new
        return self._state

    def close(self) -> None:
        self._watched.disable_monitor()
        self._events.close(linger=0)
