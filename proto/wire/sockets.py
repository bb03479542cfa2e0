"""ZeroMQ contexts, and DEALER sockets that connect to the controller."""

from typing import Final

import zmq

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.codec import MAX_FRAME_BYTES
from mlx_dp.proto.wire.curve import join_curve, watch_connection
from mlx_dp.proto.wire.key_files import WorkerKeys

HIGH_WATER_MARK: Final = 256
LEAST_LIBZMQ: Final = (4, 3, 5)
"""Older versions have holes that unauthenticated peers can use to take over or crash the process.
"""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context. Raises ConfigError where pyzmq's libzmq is too old."""
    if zmq.zmq_version_info() < LEAST_LIBZMQ:
        least = ".".join(map(str, LEAST_LIBZMQ))
        raise ConfigError(
            f"pyzmq works with libzmq {zmq.zmq_version()} here, which has known security holes; "
            f"at least {least} is needed: pip install --force-reinstall --only-binary pyzmq pyzmq "
            "brings one"
        )
    return zmq.Context()


def dealer_socket(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: str, keys: WorkerKeys | None
) -> zmq.Socket[bytes]:
    """Return a socket that is ready to connect. ``keys``: for a controller on another machine."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    over_tcp = endpoint.startswith("tcp:")
    if keys is not None:
        join_curve(socket, keys.own, keys.controller)
    elif over_tcp:
        watch_connection(socket)
    if over_tcp:
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    return socket
