"""Ports for services that are started again on the same one."""

import random
import socket
from typing import Final

LASTING: Final = range(20_000, 30_000)
"""Outside of what systems give to connections: one of those may take a port between two starts."""


def lasting_port() -> int:
    """Draw a port that is free now. No choice of a trial's: what is free is the machine's."""
    while True:
        port = random.choice(LASTING)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
