"""What this system lets a trial do to other processes and connections."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psutil

LIMITS_OTHERS: Final = hasattr(psutil.Process, "rlimit")
"""Whether the limits of another process can be changed; not on macOS."""
DROPS_ARRIVALS: Final = sys.platform == "linux"
"""Whether a socket can be told to drop what arrives, see ``raw_client.lose_power``."""


@contextmanager
def open_files_limited(pid: int, highest: int) -> Iterator[None]:
    """Forbid a process file descriptors of ``highest`` or more. Needs LIMITS_OTHERS."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (highest, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)
