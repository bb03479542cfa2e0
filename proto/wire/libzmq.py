"""The version of libzmq that sockets need."""

from typing import Final

import zmq

from mlx_dp.proto.errors import ConfigError

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
