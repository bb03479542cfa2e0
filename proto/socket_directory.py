"""A private directory for sockets, removed at close, or by a later start if we are killed."""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from mlx_dp.proto.errors import ConfigError

PREFIX: Final = "mlx-dp-"
_LOCK: Final = "lock"


class SocketDirectory:
    """A fresh directory of mode 0700, under a lock that ends with this process.

    An ipc path alone protects nothing: binding one that a live process has bound succeeds and
    steals its traffic, and the file outlives its owner.
    """

    def __init__(self, base: Path) -> None:
        """Raises ConfigError when no directory can be made under ``base``."""
        try:
            _sweep(base)
            # mkdtemp makes it 0700; the socket file itself would be open to everyone.
            self._path: Final = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            # Locked before it has its name, so that no sweep can find it unlocked.
            unnamed = self._path / "new"
            self._lock: int | None = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self._path / _LOCK)
        except OSError as error:
            raise ConfigError(f"no socket directory can be made in {base}: {error}") from None

    @property
    def path(self) -> Path:
        return self._path

    def close(self) -> None:
        """Remove it with all it holds. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _sweep(base: Path) -> None:
    """Remove the directories of processes that were killed. Nobody else's are touched."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Just made, just removed, or none of ours: all the same to us.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            # Its owner lives.
            continue
        finally:
            os.close(lock)
