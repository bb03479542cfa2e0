"""Converted models in the user's cache folder; each is either complete or absent."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mlx_dp.orchestrator.model.child_output import run_child
from mlx_dp.orchestrator.model.progress import Progress

Storage = Literal["float32", "4bit"]

# Part of every folder's name: raise it when the converter's output changes.
_CONVERTER_VERSION = 1
_CONVERT_STAGES = {"convert": "Converting the model", "write": "Writing the model"}


class ModelCache:
    """The folder of converted models, shared by all mlx-dp processes of one user.

    Invariant: a folder without a leading dot is a complete model. Only the holder of the lock
    writes here, so any unfinished file that it finds was left by a killed process.
    """

    def __init__(self, cache_dir: Path, progress: Progress) -> None:
        self._models = cache_dir / "models"
        self._progress = progress

    def path_of(self, name: str, digest: str, storage: Storage) -> Path:
        return self._models / f"{name}-{digest[:8]}-{storage}-v{_CONVERTER_VERSION}"

    def convert(self, gguf: Path, target: Path, storage: Storage, lock: int) -> None:
        """Convert in a child, which also holds the ``lock``, in case this process dies first."""
        arguments = ["convert", str(gguf), str(target), "--dtype", storage]
        try:
            run_child(arguments, self._show, keep_open=(lock,))
        except BaseException:
            self._sweep()
            raise

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the exclusive lock of the cache; yields its file descriptor."""
        self._models.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._models / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._progress.update("Waiting for another start to prepare the model", 0, 0)
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._sweep()
            yield lock
        finally:
            os.close(lock)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A temporary folder for downloads. The caller must hold the lock."""
        folder = self._models / f".work.{os.getpid()}.tmp"
        folder.mkdir()
        try:
            yield folder
        finally:
            # A conversion that failed inside the block has already removed this folder.
            shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        for leftover in self._models.glob(".*.tmp"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    def _show(self, line: dict[str, Any]) -> None:
        stage = str(line["stage"])
        self._progress.update(
            _CONVERT_STAGES.get(stage, stage), int(line["done"]), int(line["total"])
        )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_model(cache: ModelCache, gguf: Path, storage: Storage) -> Path:
    """Return the converted model of a GGUF file; convert it if needed.

    It is identified by path, size and modification time: a checksum of gigabytes would slow down
    each start.
    """
    facts = gguf.stat()
    identity = f"{gguf.resolve()}:{facts.st_size}:{facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    target = cache.path_of(gguf.stem, digest, storage)
    if target.exists():
        return target
    with cache.locked() as lock:
        if not target.exists():
            cache.convert(gguf, target, storage, lock)
    return target
