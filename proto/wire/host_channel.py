"""A worker host's end of the wire: a DEALER socket beside those of the workers."""

import logging
from typing import Final

import zmq

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.host_messages import HostDown, HostUp
from mlx_dp.proto.wire.codec import decode_host_down, encode
from mlx_dp.proto.wire.connection_state import ConnectionMonitor, ConnectionState
from mlx_dp.proto.wire.key_files import WorkerKeys
from mlx_dp.proto.wire.sockets import dealer_socket, new_context

_logger = logging.getLogger(__name__)


class HostChannel:
    """One connection to the controller. After it is lost, make another with a new identity."""

    def __init__(self, endpoint: str, identity: str, keys: WorkerKeys | None) -> None:
        self._context: Final = new_context()
        self._socket: Final = dealer_socket(self._context, endpoint, identity, keys)
        self._monitor: Final = ConnectionMonitor(self._socket)
        self._socket.connect(endpoint)

    @property
    def connection(self) -> ConnectionState:
        """The progress of the connection."""
        return self._monitor.state

    @property
    def descriptor(self) -> int:
        """Readable when a message may have arrived. Edge triggered, so also poll at intervals."""
        return int(self._socket.fileno())

    def send(self, message: HostUp) -> None:
        """Send, or drop the message if the queue is full: the controller notices the silence."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            _logger.debug("dropped a %s: the controller does not read", message.tag)

    def drain(self) -> list[HostDown]:
        """Return the messages that have arrived, in order."""
        messages: list[HostDown] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_host_down(b"".join(frames)))
            except ProtocolError as error:
                _logger.warning("dropped a malformed message: %s", error)

    def wait(self, timeout_s: float) -> bool:
        """Block until something can be read, or the time is up."""
        return bool(self._socket.poll(max(0, round(timeout_s * 1000)), zmq.POLLIN))

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close at once, or give the last messages this long to leave."""
        self._monitor.close()
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()
