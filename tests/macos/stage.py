"""Runs tests on Linux as if on macOS, as far as that can be imitated: scripts/test --macos."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

TESTS: Final = Path(__file__).resolve().parent.parent
ABSENT: Final = TESTS / "macos" / "absent"

TEMPORARY_NBYTES: Final = 90
"""The length of ``TMPDIR``'s path: macOS begins with about 57 of its own."""
OPEN_FILES: Final = 256
"""The soft limit of a shell on macOS."""

WHOLE: Final = (
    "orchestrator/process",
    "proto/wire/test_controller_channel.py",
    "proto/wire/test_worker_channel.py",
    "proto/wire/test_socket_directory.py",
    "proto/test_descriptor_limit.py",
    "orchestrator/http/connection/test_client_socket.py",
    "orchestrator/http/connection/test_listen_socket.py",
    "orchestrator/http/connection/test_slow_clients.py",
    "orchestrator/http/connection/test_disconnect.py",
    "worker/test_parent_watch.py",
    "worker/test_serve_process.py",
    "system/test_serve.py",
    "system/test_restart.py",
    "system/test_signals.py",
    "system/test_terminal.py",
    "system/test_cleaned_sockets.py",
    "system/test_controller_processes.py",
)
"""Tests of system features: processes, signals, sockets, descriptors, temporary files."""

_SELECTION: Final = "not slow and not mlx and not model"


def with_tests(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Add the whole stage to pytest's arguments unless they name a path under tests."""
    named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    return arguments if named else (*arguments, *(str(TESTS / name) for name in WHOLE))


@contextmanager
def macos_environment() -> Iterator[dict[str, str]]:
    """The environment of a process on the imitated system; its temporary folder goes later."""
    with TemporaryDirectory(prefix="m", dir="/tmp") as base:
        temporary = Path(base, "T" * (TEMPORARY_NBYTES - len(base) - 1))
        temporary.mkdir()
        path = os.pathsep.join(filter(None, (str(ABSENT), os.environ.get("PYTHONPATH"))))
        yield {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}


def run_pytest(arguments: tuple[str, ...]) -> int:
    """Run pytest there, and return its exit status."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, before[1]))
    with macos_environment() as environment:
        return subprocess.call(
            [sys.executable, "-m", "pytest", "-m", _SELECTION, *arguments],
            cwd=TESTS.parent,
            env=environment,
        )


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("macOS is imitated on Linux only: leave --macos out")
    sys.exit(run_pytest(with_tests(tuple(sys.argv[1:]))))
