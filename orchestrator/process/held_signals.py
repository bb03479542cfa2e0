"""Children that leave the signals which end a service to the controller."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

_HELD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def held_signals() -> Iterator[None]:
    """Start children with these signals blocked, which systemd and terminals send to everybody.

    A process that is told to end by its parent alone must not die of them first: not before its
    own first line either, so that it inherits the mask. A child that lives for longer ignores the
    signals and removes the mask. What this process gets meanwhile, it gets afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_short_child(command: Sequence[str], data: bytes) -> "subprocess.CompletedProcess[bytes]":
    """Run a child that ends by itself soon, with ``data`` as its input.

    What ends the service lets running requests finish, and their children with them.
    """
    with held_signals():
        return subprocess.run(
            command, input=data, capture_output=True, check=False, start_new_session=True
        )
