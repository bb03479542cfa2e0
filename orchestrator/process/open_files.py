"""The limit on open files of this process, where each connection is one."""

import os
import resource
from typing import Final

# Shells set 1024 on Linux and 256 on macOS, which is too little for a server.
WANTED: Final = 65_536
# Older macOS accepts no more, even if the hard limit is higher.
_LEAST_WANTED: Final = 10_240


def raise_open_files() -> int:
    """Raise the soft limit as far as the system allows, and return it. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (WANTED, _LEAST_WANTED):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or most <= soft:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (ValueError, OSError):
            continue
        return most
    return soft


def check_open_files(count: int) -> None:
    """Raise OSError if ``count`` more files cannot be opened now."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in opened:
            os.close(descriptor)
