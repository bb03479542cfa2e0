"""A directory of keys for peers that may connect over TCP, in files of one line each.

``NAME.key`` is a secret and ``NAME.pub`` its public half. The controller has ``controller.key``
and the ``.pub`` of each worker that it accepts; a worker has its own ``.key`` and
``controller.pub``.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.curve_keys import KEY_CHARS, CurveKeys
from mlx_dp.proto.wire.curve import make_keys

CONTROLLER: Final = "controller"
_SECRET: Final = ".key"
_PUBLIC: Final = ".pub"
_MAX_NBYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerKeys:
    """The controller's key pair, and the public keys of the workers that it accepts."""

    own: CurveKeys
    allowed: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """A worker's key pair, and its controller's public key."""

    own: CurveKeys
    controller: str


def write_keys(directory: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Make key pairs for the controller, unless it has one, and for the workers in ``names``.

    Returns the paths written. Raises ConfigError before it overwrites anything.
    """
    for name in names:
        if name == CONTROLLER or not name.isascii() or not name.replace("-", "").isalnum():
            raise ConfigError(
                f"--name {name!r} cannot be a worker's: use letters, digits and dashes, and "
                f"not {CONTROLLER!r}"
            )
        for path in (directory / f"{name}{_SECRET}", directory / f"{name}{_PUBLIC}"):
            if path.exists():
                raise ConfigError(
                    f"{path} exists, and keys are never overwritten: use another --name, or "
                    "remove it"
                )
    wanted = [*names]
    if not (directory / f"{CONTROLLER}{_SECRET}").exists():
        wanted.insert(0, CONTROLLER)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tuple(path for name in wanted for path in _write_pair(directory, name))
    except OSError as error:
        raise ConfigError(f"no keys can be written in {directory}: {error}") from None


def _write_pair(directory: Path, name: str) -> tuple[Path, Path]:
    keys = make_keys()
    secret, public = directory / f"{name}{_SECRET}", directory / f"{name}{_PUBLIC}"
    for path, text, mode in ((secret, keys.secret, 0o600), (public, keys.public, 0o644)):
        # Created with its final mode: a later chmod would leave it readable for a moment.
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{text}\n")
    return secret, public


def read_controller_keys(directory: Path) -> ControllerKeys:
    """Read the keys. Raises ConfigError if one is missing, or others can read a secret."""
    allowed = frozenset(
        _read(path) for path in sorted(directory.glob(f"*{_PUBLIC}")) if path.stem != CONTROLLER
    )
    if not allowed:
        raise ConfigError(
            f"--keys {directory} holds no worker's {_PUBLIC} file, so that no worker could "
            f"connect: make one with mlx-dp keys --dir {directory}"
        )
    return ControllerKeys(own=_read_pair(directory / f"{CONTROLLER}{_SECRET}"), allowed=allowed)


def read_worker_keys(directory: Path) -> WorkerKeys:
    """Read the keys. Raises ConfigError if one is missing or ambiguous, or others can read a
    secret.
    """
    own = [path for path in sorted(directory.glob(f"*{_SECRET}")) if path.stem != CONTROLLER]
    if len(own) != 1:
        found = ", ".join(path.name for path in own) or "none"
        raise ConfigError(
            f"--keys {directory} must hold one worker's {_SECRET} file, and holds {found}: copy "
            f"this worker's {_SECRET} file and {CONTROLLER}{_PUBLIC} there"
        )
    return WorkerKeys(
        own=_read_pair(own[0]), controller=_read(directory / f"{CONTROLLER}{_PUBLIC}")
    )


def _read_pair(path: Path) -> CurveKeys:
    secret = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} may be read by others (mode {mode:04o}): chmod 600 {path}")
    return CurveKeys(public=zmq.curve_public(secret.encode()).decode(), secret=secret)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_NBYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"no key can be read from {path}: {error}") from None
    # This fails for a text that is not a key.
    if len(text) != KEY_CHARS or not _is_key(text):
        raise ConfigError(f"{path} holds no key: make one with mlx-dp keys")
    return text


def _is_key(text: str) -> bool:
    try:
        return len(zmq.curve_public(text.encode())) == KEY_CHARS
    except zmq.ZMQError:
        return False
