"""Ports for services that are restarted on the same one."""

import random
import socket
from typing import Final

LASTING: Final = range(20_000, 30_000)
"""Outside the range of ephemeral ports: a connection could take one of those between two starts."""


def lasting_port() -> int:
    """Draw a port that is free now. Not by the trial's seed: the machine decides what is free."""
    while True:
        port = random.choice(LASTING)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
