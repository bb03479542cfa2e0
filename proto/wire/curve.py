"""Encrypted sockets (CurveZMQ): both ends of a TCP connection authenticate each other.

Set a socket's keys before it binds or connects: each endpoint keeps the options that the socket had
then. So one socket may have an ipc endpoint without keys and a TCP endpoint with keys.
"""

import threading
from typing import Final

import zmq
from zmq.utils import z85

from mlx_dp.proto.messages.curve_keys import CurveKeys

_DOMAIN: Final = b"mlx-dp"
_OPEN_DOMAIN: Final = b"mlx-dp-open"
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_KEY_NBYTES: Final = 32
_REQUEST_FRAMES: Final = 7
"""Version, request id, domain, address, identity, mechanism and the client's key."""
_OPEN_REQUEST_FRAMES: Final = 6
"""The same without a key."""
HANDSHAKE_INTERVAL_MS: Final = 5_000
HEARTBEAT_INTERVAL_MS: Final = 1_000
HEARTBEAT_TIMEOUT_MS: Final = 5_000
_KEEPALIVE_IDLE_S: Final = 5
_KEEPALIVE_PROBES: Final = 3


def make_keys() -> CurveKeys:
    """Make a new pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public=public.decode(), secret=secret.decode())


def serve_curve(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Accept on endpoints bound from now on only peers that the context's ``KeyGuard`` accepts."""
    watch_connection(socket)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without this, every client would be accepted if there is no guard.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def serve_openly(socket: zmq.Socket[bytes], *, guarded: bool) -> None:
    """Undo ``serve_curve`` and ``watch_connection`` for endpoints bound from now on.

    For endpoints in a private directory. ``guarded``: the socket's context has a ``KeyGuard``.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    if guarded:
        socket.setsockopt(zmq.CURVE_SERVER, 0)
        # A domain cannot be unset, and with a domain libzmq asks the guard about each connection.
        socket.setsockopt(zmq.ZAP_DOMAIN, _OPEN_DOMAIN)


def join_curve(socket: zmq.Socket[bytes], keys: CurveKeys, server_public: str) -> None:
    """Connect from now on only to the holder of that server's secret key."""
    watch_connection(socket)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def watch_connection(socket: zmq.Socket[bytes]) -> None:
    """Detect a cut cable or a stopped machine, and end the connection."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)


class KeyGuard:
    """Accepts connections to the sockets of a context from holders of the given keys only.

    Endpoints that were bound after ``serve_openly`` are open. libzmq names an endpoint's domain by
    the options that it was bound with, so that no client can choose this one.

    Answers ZeroMQ's authentication protocol (ZAP) in a thread of its own, which ends with the
    context. Make it before the first socket binds; ``close`` it after ``context.term()``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[str]) -> None:
        self._allowed: Final = frozenset(key.encode() for key in allowed)
        self._socket: Final[zmq.Socket[bytes]] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self._thread: Final = threading.Thread(target=self._answer, name="key-guard", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        try:
            while True:
                request = self._socket.recv_multipart()
                self._socket.send_multipart(self._verdict(request))
        except zmq.ContextTerminated:
            # Terminating the context waits for this.
            self._socket.close(linger=0)

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        assert len(request) >= 2, f"a request of {len(request)} frames from our own socket"
        status = b"200" if self._is_allowed(request) else b"400"
        return [_ZAP_VERSION, request[1], status, b"", b"", b""]

    def _is_allowed(self, request: list[bytes]) -> bool:
        if len(request) == _OPEN_REQUEST_FRAMES:
            version, _, domain, _, _, mechanism = request
            return (version, domain, mechanism) == (_ZAP_VERSION, _OPEN_DOMAIN, b"NULL")
        if len(request) != _REQUEST_FRAMES:
            return False
        version, _, domain, _, _, mechanism, key = request
        known = (version, domain, mechanism) == (_ZAP_VERSION, _DOMAIN, b"CURVE")
        # The key is public, so the time of the comparison reveals nothing.
        return known and len(key) == _KEY_NBYTES and z85.encode(key) in self._allowed

    def close(self) -> None:
        """Wait for the thread. Idempotent."""
        self._thread.join()
