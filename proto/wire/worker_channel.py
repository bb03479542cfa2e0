"""The worker's end of the wire: a DEALER socket that connects to the controller."""

import hashlib
import logging
from collections import deque
from typing import Final

import zmq

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.events import Up
from mlx_dp.proto.wire.codec import decode_down, encode
from mlx_dp.proto.wire.key_files import WorkerKeys
from mlx_dp.proto.wire.sockets import dealer_socket, new_context

MAX_BACKLOG_FRAMES: Final = 65_536
MAX_DRAINED_MESSAGES: Final = 1_024

_logger = logging.getLogger(__name__)


class WorkerChannel:
    """Sends events and receives commands. Owned by one thread.

    No message is ever dropped here: a frame that the socket refuses, because the controller does
    not read, waits in a backlog and is sent first once there is room. While ``congested``, the loop
    runs no steps, which bounds the backlog.
    """

    def __init__(self, endpoint: str, identity: str, keys: WorkerKeys | None = None) -> None:
        """``keys`` are for a controller on another machine."""
        self._context: Final = new_context()
        self._socket: Final = dealer_socket(self._context, endpoint, identity, keys)
        self._backlog: Final[deque[bytes]] = deque()
        self._malformed = 0
        if endpoint.startswith("tcp:"):
            # Frames under way are lost with the connection, so the socket must not reconnect.
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.connect(endpoint)

    @property
    def congested(self) -> bool:
        """Whether frames wait for the controller to read. Tries to send them first."""
        self._flush()
        return bool(self._backlog)

    @property
    def malformed_frames(self) -> int:
        """Frames from the controller that were dropped because they broke the protocol."""
        return self._malformed

    def send(self, message: Up) -> None:
        """Send, or put into the backlog, in order.

        Raises ProtocolError if the message is too big, or if the controller sends commands
        endlessly without reading answers.
        """
        if len(self._backlog) >= MAX_BACKLOG_FRAMES:
            raise ProtocolError(f"the controller does not read: {len(self._backlog)} frames wait")
        self._backlog.append(encode(message))
        self._flush()

    def _flush(self) -> None:
        while self._backlog:
            try:
                self._socket.send(self._backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._backlog.popleft()

    def drain(self) -> list[Down]:
        """Return the messages that have arrived, up to a limit, so that the loop continues."""
        messages: list[Down] = []
        while len(messages) < MAX_DRAINED_MESSAGES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(_decode(frames))
            except ProtocolError as error:
                self._malformed += 1
                _logger.warning("dropped a malformed message: %s", error)
        return messages

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        """Block until a message can be read (True), a backlog can move, or the time is up.

        It also returns when the file descriptor ``beside`` is readable.
        """
        waiting_for = zmq.POLLIN | zmq.POLLOUT if self._backlog else zmq.POLLIN
        poller = zmq.Poller()
        poller.register(self._socket, waiting_for)
        if beside is not None:
            poller.register(beside, zmq.POLLIN)
        ready = dict(poller.poll(max(0, round(timeout_s * 1000))))
        events = ready.get(self._socket, 0)
        if events & zmq.POLLOUT:
            self._flush()
        return bool(events & zmq.POLLIN)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close at once, or give the last frames this long to leave."""
        if linger_s > 0.0 and self._backlog:
            self.wait(linger_s)
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()


def _decode(frames: list[bytes]) -> Down:
    """Return the message, which is a single frame, or raise ProtocolError.

    The error names size and hash only: the codec's reason may quote a client's text.
    """
    if len(frames) != 1:
        raise ProtocolError(f"{len(frames)} frames for one message: {_fingerprint(frames)}")
    try:
        return decode_down(frames[0])
    except ProtocolError:
        raise ProtocolError(_fingerprint(frames)) from None


def _fingerprint(frames: list[bytes]) -> str:
    digest = hashlib.blake2b(b"".join(frames), digest_size=6).hexdigest()
    return f"{sum(map(len, frames))} bytes, hash {digest}"
