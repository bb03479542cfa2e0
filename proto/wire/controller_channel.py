"""The controller's end of the wire: a ROUTER socket that binds, so no queue outlives a worker."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import zmq

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down, Shutdown
from mlx_dp.proto.messages.events import Up
from mlx_dp.proto.messages.host_messages import HostDown, HostUp, is_host
from mlx_dp.proto.wire.codec import decode_host_up, decode_up, encode
from mlx_dp.proto.wire.key_files import ControllerKeys
from mlx_dp.proto.wire.router_socket import NotConnectedError as NotConnectedError
from mlx_dp.proto.wire.router_socket import PeerCongestedError as PeerCongestedError
from mlx_dp.proto.wire.router_socket import Received, RouterSocket
from mlx_dp.proto.wire.socket_directory import SocketDirectory

HIGH_WATER_MARK: Final = 256
MAX_DRAINED_MESSAGES: Final = 256
SHORT_BASE: Final = Path("/tmp")
"""macOS allows 103 bytes for an ipc path, and its usual temporary folder takes half."""

_SOCKET_NAME: Final = "workers"

_logger = logging.getLogger(__name__)

TakeHost = Callable[[str, HostUp | ProtocolError], None]
_T = TypeVar("_T")


class ControllerChannel:
    """Sends commands to workers by identity, and receives their events. Owned by the event loop.

    A send is no acknowledgement: a request counts as delivered once the worker answers. Messages
    from identities that were not announced with ``expect`` are dropped. Each identity is used only
    once, so no message of an earlier incarnation gets through.
    """

    def __init__(
        self,
        *,
        base: Path | None = SHORT_BASE,
        high_water_mark: int = HIGH_WATER_MARK,
        remote: str | None = None,
        keys: ControllerKeys | None = None,
    ) -> None:
        """Bind an ipc endpoint in a fresh private directory under ``base``; None: loopback TCP.

        ``remote``: host:port to bind for other machines; only holders of ``keys`` can connect.
        Raises ConfigError if an endpoint cannot be bound, or would accept clients without keys.
        """
        self._directory: SocketDirectory | None = None
        self._bound_file: tuple[int, int] | None = None
        self._known: Final[set[bytes]] = set()
        self._forgotten: Final[set[bytes]] = set()
        self._unknown_frames = 0
        self._take_host: TakeHost | None = None
        self._socket: Final = RouterSocket(high_water_mark=high_water_mark, keys=keys)
        try:
            self._endpoint: Final = self._bind(base if zmq.has("ipc") else None)
            # Last, since the keys apply to all endpoints bound afterwards.
            self._remote: Final = None if remote is None else self._socket.bind_tcp(remote)
        except BaseException:
            self.close()
            raise

    def _bind(self, base: Path | None) -> str:
        if base is None:
            return self._socket.bind_loopback()
        self._directory = SocketDirectory(base)
        path = self._directory.path / _SOCKET_NAME
        endpoint = self._socket.bind_ipc(path)
        self._bound_file = _file_id(path)
        return endpoint

    def keep_endpoint(self) -> None:
        """Keep the ipc endpoint usable on systems that clean their temporary folder.

        Refreshes the times of its files now and then, and binds it again where its file is gone.
        Workers that are connected stay so. Raises OSError where it cannot be bound again.
        """
        if self._directory is None:
            return
        self._directory.refresh(time.time())
        path = self._directory.path / _SOCKET_NAME
        if _file_id(path) != self._bound_file:
            self._socket.rebind_ipc(path)
            self._bound_file = _file_id(path)
            _logger.warning("the socket %s was gone: it is bound again", path)

    @property
    def endpoint(self) -> str:
        """The endpoint for workers of this machine."""
        return self._endpoint

    @property
    def remote_endpoint(self) -> str | None:
        """The endpoint for workers of other machines; None: there are none."""
        return self._remote

    @property
    def unknown_frames(self) -> int:
        """The number of messages dropped because their sender is not expected."""
        return self._unknown_frames

    def expect(self, identity: str) -> None:
        """Accept messages from this identity from now on."""
        self._known.add(identity.encode())

    def forget(self, identity: str) -> None:
        """Drop messages from this identity from now on, even if its process wakes up later."""
        self._known.discard(identity.encode())
        self._forgotten.add(identity.encode())

    def send(self, identity: str, message: Down) -> None:
        """Pass a message to the socket, at once or not at all.

        Raises NotConnectedError, PeerCongestedError, or ProtocolError for too big a message.
        """
        self._socket.send(identity.encode(), encode(message))

    def hear_hosts(self, take: TakeHost) -> None:
        """Have ``drain`` call ``take`` with messages from the hosts of remote workers."""
        self._take_host = take

    def send_host(self, identity: str, message: HostDown) -> None:
        """As ``send``, to the host of a remote worker."""
        self._socket.send(identity.encode(), encode(message))

    def drain(self) -> list[tuple[str, Up | ProtocolError]]:
        """Return the messages that have arrived, in order; few enough to keep the event loop
        turning.
        """
        arrived: list[tuple[str, Up | ProtocolError]] = []
        for _ in range(MAX_DRAINED_MESSAGES):
            received = self._socket.receive()
            if received is None:
                return arrived
            identity = received.identity
            if identity in self._known:
                arrived.append((identity.decode(), _decode(received, decode_up)))
            elif self._take_host is not None and is_host(identity):
                self._take_host(identity.decode(), _decode(received, decode_host_up))
            else:
                self._unknown_frames += 1
                self._send_shutdown(identity)
        self._socket.rearm()
        return arrived

    def _send_shutdown(self, identity: bytes) -> None:
        """Send Shutdown to a worker that was given up and still sends. Unknown senders get no
        answer.
        """
        if identity not in self._forgotten:
            return
        # A peer that does not read, or has gone, is answered again at its next message.
        with suppress(PeerCongestedError, NotConnectedError):
            self._socket.send(identity, encode(Shutdown()))
            self._forgotten.discard(identity)

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        """Call ``on_arrival`` from the loop whenever there may be something to drain."""
        self._socket.attach(loop, on_arrival)

    def close(self) -> None:
        """Drop unsent messages, and remove the endpoint. Idempotent."""
        self._socket.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return an identity of the file at a path; None: there is no file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _decode(received: Received, decode: Callable[[bytes], _T]) -> _T | ProtocolError:
    """Decode a message, which is a single frame. Errors name its size and hash, never its bytes."""
    if received.frame is None:
        return ProtocolError(f"{received.parts} frames for 1, {received.nbytes} bytes")
    frame = received.frame.bytes
    try:
        return decode(frame)
    except ProtocolError as error:
        digest = hashlib.blake2b(frame, digest_size=6).hexdigest()
        cause = ProtocolError(f"malformed message, {received.nbytes} bytes, hash {digest}")
        cause.__cause__ = error
        return cause
