"""A private directory for sockets. It is removed at close; after a kill, by the next start."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from mlx_dp.proto.errors import ConfigError

PREFIX: Final = "mlx-dp-"
_LOCK: Final = "lock"

REFRESH_S: Final = 6 * 3600.0
"""macOS removes files of its temporary folder that were not used for three days."""


def refresh_due(touched_at: float, now: float) -> bool:
    """Whether files with the time ``touched_at`` are due for a refresh, by the wall clock.

    The wall clock runs while the machine sleeps, and cleaners of temporary files use it. It may be
    set back.
    """
    return not 0.0 <= now - touched_at < REFRESH_S


class SocketDirectory:
    """A fresh directory of mode 0700, under a lock that ends with this process.

    An ipc path alone protects nothing: binding one that a live process has bound succeeds and
    steals its traffic, and the file outlives its owner.
    """

    def __init__(self, base: Path) -> None:
        """Make the directory under ``base``. Raises ConfigError if that fails."""
        try:
            _sweep(base)
            # mkdtemp makes it 0700; the socket file itself would be open to everyone.
            self._path: Final = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock: int | None = _make_lock(self._path)
        except OSError as error:
            raise ConfigError(f"no socket directory can be made in {base}: {error}") from None

    @property
    def path(self) -> Path:
        return self._path

    def refresh(self, now: float) -> None:
        """Restore the directory and its lock where they were removed, and refresh all files'
        times.

        ``now`` is the time of the wall clock. Raises OSError where they cannot be made again.
        """
        if self._lock is None:
            return
        try:
            self._restore(self._lock)
        except OSError as error:
            raise OSError(
                f"the socket directory {self._path} is gone and cannot be made again: {error}"
            ) from None
        # The lock is the oldest file, since nothing else touches it.
        if refresh_due((self._path / _LOCK).stat().st_mtime, now):
            for path in (self._path, *self._path.iterdir()):
                # A group's socket may be removed meanwhile.
                with suppress(FileNotFoundError):
                    os.utime(path, (now, now), follow_symlinks=False)

    def _restore(self, lock: int) -> None:
        with suppress(FileExistsError):
            self._path.mkdir(mode=0o700)
        # If it was gone, another user may have taken its name.
        if not _is_ours(self._path.lstat()):
            raise OSError(errno.EEXIST, "the name is taken")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), (self._path / _LOCK).lstat()):
                return
        self._lock = _make_lock(self._path)
        os.close(lock)

    def close(self) -> None:
        """Remove the directory with all its files. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _make_lock(directory: Path) -> int:
    # Locked under another name first, so that no sweep finds it unlocked.
    unnamed = directory / "new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(directory / _LOCK)
    return lock


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _sweep(base: Path) -> None:
    """Remove the directories of killed processes of this user. Other directories stay."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            if not _is_ours(path.lstat()):
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Just made, just removed, or not ours: it stays in each case.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            # Its process is alive.
            continue
        finally:
            os.close(lock)
