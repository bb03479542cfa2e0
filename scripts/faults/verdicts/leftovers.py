"""System resources that a service holds, and may leave behind: directories, locks, processes."""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from mlx_dp.proto.wire.controller_channel import SHORT_BASE
from mlx_dp.proto.wire.socket_directory import PREFIX
from scripts.faults.service.process import ChaosService
from scripts.faults.verdicts.verdict import RowResult

LOCK: Final = "lock"


def socket_directories(pid: int) -> set[Path]:
    """The private directories of a controller, which holds their locks."""
    files = (Path(each.path) for each in psutil.Process(pid).open_files())
    return {
        path.parent for path in files if path.name == LOCK and path.parent.name.startswith(PREFIX)
    }


def is_guarded(directory: Path) -> bool:
    """Whether the directory is private and its lock is held."""
    if stat.S_IMODE(directory.stat().st_mode) != 0o700:
        return False
    with (directory / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def listening_port(pid: int) -> int:
    """The TCP port that a controller listens on, open before its workers start."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return int(next(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN))


def descendants(service: ChaosService) -> list[int]:
    """All processes that a controller started, at any depth: they inherit its environment."""
    found = []
    for process in psutil.process_iter():
        # A process that ends meanwhile is no leftover; one with a hidden environment is not
        # ours.
        with suppress(psutil.Error):
            path = process.environ().get("PYTHONPATH", "")
            if process.pid != service.pid and path.startswith(str(service.orders)):
                found.append(process.pid)
    return found


def check_guarded(result: RowResult, service: ChaosService) -> None:
    """Check that a service holds one private directory under a lock."""
    directories = socket_directories(service.pid)
    if len(directories) != 1 or not all(map(is_guarded, directories)):
        result.violate(f"socket directories {directories}, of which each should be 0700 and locked")


@contextmanager
def planted() -> Iterator[tuple[Path, Path]]:
    """The directory of a killed controller, with its socket, and that of a living one."""
    directories = tuple(Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHORT_BASE)) for _ in range(2))
    stale, held = directories
    try:
        for directory in directories:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(directory / "workers"))
        # Locked before it has its name: a service that starts now removes unlocked
        # directories.
        with (held / "new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(held / "new", held / LOCK)
            (stale / LOCK).touch()
            yield stale, held
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
