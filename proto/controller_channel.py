"""The controller's end of the wire: a ROUTER socket that binds, so no queue outlives a worker."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq

from mlx_dp.proto.codec import MAX_FRAME_BYTES, decode_up, encode
from mlx_dp.proto.errors import ConfigError, ProtocolError
from mlx_dp.proto.messages import Down, Shutdown, Up
from mlx_dp.proto.socket_directory import SocketDirectory

HIGH_WATER_MARK: Final = 256
MAX_DRAINED_MESSAGES: Final = 256
HANDSHAKE_INTERVAL_MS: Final = 5_000
SHORT_BASE: Final = Path("/tmp")
"""macOS allows 103 bytes for an ipc path, of which its usual temporary folder takes half."""


class PeerLostError(Exception):
    """Nobody with this identity is connected. What was sent to it earlier may be lost too."""


class PeerCongestedError(Exception):
    """The peer takes no more for now; the message was not sent. It may be alive."""


class ControllerChannel:
    """Sends verbs to workers by identity, and receives their facts. Owned by the event loop.

    A send acknowledges nothing: a request is delivered only once the worker answers. Only
    identities that were announced with ``expect`` are heard, and each of them is used once, so
    that nothing of an earlier incarnation gets through.
    """

    def __init__(
        self, *, base: Path | None = SHORT_BASE, high_water_mark: int = HIGH_WATER_MARK
    ) -> None:
        """Bind an ipc endpoint in a fresh private directory under ``base``; None: loopback TCP.

        Raises ConfigError when the path is too long or cannot be made.
        """
        self._directory: SocketDirectory | None = None
        self._known: Final[set[bytes]] = set()
        self._forgotten: Final[set[bytes]] = set()
        self._unknown_frames = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_arrival: Callable[[], None] | None = None
        self._rearmed = False
        self._context: Final = zmq.Context()
        self._socket: Final[zmq.Socket[bytes]] = self._context.socket(zmq.ROUTER)
        try:
            self._configure(high_water_mark)
            self._bind(base if zmq.has("ipc") else None)
        except BaseException:
            self.close()
            raise

    def _configure(self, high_water_mark: int) -> None:
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_INTERVAL_MS)

    def _bind(self, base: Path | None) -> None:
        if base is None:
            self._socket.bind("tcp://127.0.0.1:0")
            return
        self._directory = SocketDirectory(base)
        path = self._directory.path / "workers"
        length = len(str(path).encode())
        if length > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"the socket path {path} takes {length} bytes, but this system allows "
                f"{zmq.IPC_PATH_MAX_LEN}: use a shorter directory"
            )
        self._socket.bind(f"ipc://{path}")

    @property
    def endpoint(self) -> str:
        """Where workers connect. Never a guess: it is read back from the bound socket."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def unknown_frames(self) -> int:
        """Messages that were dropped, since their sender is not expected (any longer)."""
        return self._unknown_frames

    def expect(self, identity: str) -> None:
        """Hear this identity from now on."""
        self._known.add(identity.encode())

    def forget(self, identity: str) -> None:
        """Never hear this identity again, even if its process wakes up later."""
        self._known.discard(identity.encode())
        self._forgotten.add(identity.encode())

    def send(self, identity: str, message: Down) -> None:
        """Hand a message to the socket, at once or not at all.

        Raises PeerLostError or PeerCongestedError, and ProtocolError for a message too big to send.
        """
        frame = encode(message)
        try:
            self._socket.send_multipart((identity.encode(), frame), zmq.DONTWAIT)
        except zmq.Again:
            raise PeerCongestedError(f"{identity}: its queue of messages is full") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLostError(f"{identity}: not connected") from None
        finally:
            self._rearm()

    def drain(self) -> list[tuple[str, Up | ProtocolError]]:
        """Return what has arrived, in order; at most so much that the event loop keeps turning."""
        arrived: list[tuple[str, Up | ProtocolError]] = []
        for _ in range(MAX_DRAINED_MESSAGES):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return arrived
            if identity not in self._known:
                self._unknown_frames += 1
                self._send_away(identity)
                continue
            arrived.append((identity.decode(), _decode(frames)))
        self._rearm()
        return arrived

    def _send_away(self, identity: bytes) -> None:
        """Have one that was given up, and still speaks, end by itself. Strangers get no answer."""
        if identity not in self._forgotten:
            return
        try:
            self._socket.send_multipart((identity, encode(Shutdown())), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # It does not read, or has gone: whatever it says next is answered again.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
        else:
            self._forgotten.discard(identity)

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        """Call ``on_arrival`` from the loop whenever there may be something to drain."""
        self._loop = loop
        self._on_arrival = on_arrival
        loop.add_reader(self._socket.fileno(), self._readable)
        self._rearm()

    def _readable(self) -> None:
        if self._on_arrival is not None and self._arrived():
            self._on_arrival()

    def _arrived(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def _rearm(self) -> None:
        """Look again soon where the descriptor will stay silent.

        It is edge triggered: neither a send, which takes the edge, nor a drain that stops early
        is followed by another edge for what already lies in the queue.
        """
        if self._loop is None or self._rearmed:
            return
        if self._arrived():
            self._rearmed = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._rearmed = False
        if not self._socket.closed:
            self._readable()

    def close(self) -> None:
        """Drop what was not sent, and remove the endpoint. Idempotent."""
        if not self._socket.closed:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._loop = None
            self._socket.close(linger=0)
            self._context.term()
        if self._directory is not None:
            self._directory.close()


def _decode(frames: list[bytes]) -> Up | ProtocolError:
    """Decode a message, which is a single frame. Errors name its size and hash, never its bytes."""
    size = sum(map(len, frames))
    if len(frames) != 1:
        return ProtocolError(f"{len(frames)} frames for 1, {size} bytes, {_digest(frames)}")
    try:
        return decode_up(frames[0])
    except ProtocolError as error:
        cause = ProtocolError(f"malformed message, {size} bytes, {_digest(frames)}")
        cause.__cause__ = error
        return cause


def _digest(frames: list[bytes]) -> str:
    return f"hash {hashlib.blake2b(b''.join(frames), digest_size=6).hexdigest()}"
