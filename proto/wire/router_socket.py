"""A ROUTER socket that binds, so that no queue outlives a peer, driven by an event loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.codec import MAX_FRAME_BYTES
from mlx_dp.proto.wire.curve import (
    HANDSHAKE_INTERVAL_MS,
    KeyGuard,
    serve_curve,
    serve_openly,
    watch_connection,
)
from mlx_dp.proto.wire.key_files import ControllerKeys
from mlx_dp.proto.wire.loopback import is_loopback
from mlx_dp.proto.wire.sockets import new_context

LAST_PORT: Final = 65535
MAX_PARTS_AT_A_TIME: Final = 256
"""The most parts of one message to read in one iteration of the event loop."""


class NotConnectedError(Exception):
    """No peer with this identity is connected. Messages sent to it earlier may be lost too."""


class PeerCongestedError(Exception):
    """The peer's queue is full, and the message was not sent. The peer may be alive."""


@dataclass(slots=True)
class Received:
    """A message from a peer. Only the first of its parts is kept, and it is not copied."""

    identity: bytes
    parts: int = 0
    nbytes: int = 0
    first: zmq.Frame | None = None

    def add_part(self, part: zmq.Frame) -> None:
        if self.parts == 0:
            self.first = part
        self.parts += 1
        self.nbytes += len(part)

    @property
    def frame(self) -> zmq.Frame | None:
        """Its only part, or None: a message is a single frame."""
        return self.first if self.parts == 1 else None


class RouterSocket:
    """Sends and receives frames by peer identity. Owned by the event loop; ``close`` it.

    This class keeps at most MAX_FRAME_BYTES of a message. libzmq has no such limit: it collects all
    parts of a message before it returns the first, and neither MAXMSGSIZE nor a high-water mark
    limits their number. One message of 150 parts of 1 MiB costs 158 MB until it is dropped. So
    untrusted clients must not reach the socket: see ``bind_ipc`` and ``bind_tcp``.
    """

    def __init__(self, *, high_water_mark: int, keys: ControllerKeys | None = None) -> None:
        """``keys`` apply to ``bind_tcp``. Raises ConfigError as ``new_context`` does."""
        self._keys: Final = keys
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_arrival: Callable[[], None] | None = None
        self._rearmed = False
        self._partial: Received | None = None
        self._context: Final = new_context()
        self._guard: Final = None if keys is None else KeyGuard(self._context, keys.allowed)
        self._socket: Final[zmq.Socket[bytes]] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_INTERVAL_MS)

    def bind_loopback(self) -> str:
        """Bind a free loopback port, on systems without ipc sockets."""
        self._socket.bind("tcp://127.0.0.1:0")
        return self._bound()

    def bind_ipc(self, path: Path) -> str:
        """Bind a path. Raises ConfigError as ``check_ipc_path`` does."""
        check_ipc_path(path)
        self._socket.bind(f"ipc://{path}")
        return self._bound()

    def rebind_ipc(self, path: Path) -> None:
        """Bind a path of ``bind_ipc`` whose file is gone. Raises OSError.

        The first endpoint is not unbound, which would cut the connections that were made by it.
        """
        serve_openly(self._socket, guarded=self._keys is not None)
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            cause = zmq.strerror(error.errno or 0)
            raise OSError(f"the socket {path} is gone and cannot be bound again: {cause}") from None

    def bind_tcp(self, address: str) -> str:
        """Bind ``host:port``, after every endpoint that needs no keys.

        Raises ConfigError if it cannot be bound, or would accept clients without keys.
        """
        if self._keys is not None:
            serve_curve(self._socket, self._keys.own)
        else:
            check_open_address(address)
            watch_connection(self._socket)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            cause = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"--dist-init-addr {address} cannot be bound ({cause}): use an address of this "
                "machine and a free port"
            ) from None
        return self._bound()

    def _bound(self) -> str:
        """Return the endpoint as the bound socket reports it."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send at once or not at all. Raises NotConnectedError or PeerCongestedError."""
        try:
            self._socket.send_multipart((identity, frame), zmq.DONTWAIT)
        except zmq.Again:
            name = identity.decode()
            raise PeerCongestedError(f"{name}: its queue of messages is full") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise NotConnectedError(f"{identity.decode()}: not connected") from None
        finally:
            self.rearm()

    def receive(self) -> Received | None:
        """Return the next message, or None. Call ``rearm`` when stopping before None.

        A message with endless parts is dropped over several iterations of the event loop.
        """
        message = self._partial
        try:
            if message is None:
                message = self._partial = Received(self._socket.recv(zmq.DONTWAIT))
            for _ in range(MAX_PARTS_AT_A_TIME):
                part = self._socket.recv(zmq.DONTWAIT, copy=False)
                message.add_part(part)
                if not part.more:
                    self._partial = None
                    return message
        except zmq.Again:
            return None
        self.rearm()
        return None

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        """Call ``on_arrival`` from the loop whenever there may be something to receive."""
        self._loop = loop
        self._on_arrival = on_arrival
        loop.add_reader(self._socket.fileno(), self._readable)
        self.rearm()

    def detach(self) -> None:
        """Leave the loop. Idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None

    def _readable(self) -> None:
        if self._on_arrival is not None and self._arrived():
            self._on_arrival()

    def _arrived(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def rearm(self) -> None:
        """Schedule another read, since the descriptor may not become readable again.

        It is edge triggered: after a send, which consumes the edge, and after a drain that stops
        early, no new edge reports the messages already queued.
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
        """Drop unsent messages. Idempotent."""
        if self._socket.closed:
            return
        self.detach()
        self._socket.close(linger=0)
        self._context.term()
        if self._guard is not None:
            self._guard.close()


def check_ipc_path(path: Path) -> None:
    """Raise ConfigError for a path that is longer than this system allows."""
    length = len(str(path).encode())
    if length > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"the socket path {path} takes {length} bytes, but this system allows "
            f"{zmq.IPC_PATH_MAX_LEN}: use a shorter directory"
        )


def check_open_address(address: str) -> None:
    """Raise ConfigError if other machines could reach a ``host:port`` without keys."""
    if not is_loopback(host_of(address)):
        raise ConfigError(
            f"{address} can be reached from other machines, and without keys any program there "
            "could be a worker: make some with mlx-dp keys and give their directory as --keys"
        )


def host_of(address: str) -> str:
    """Return the host of ``host:port``."""
    return address.rpartition(":")[0].strip("[]")
