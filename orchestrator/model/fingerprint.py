"""Fingerprints of model directories, to compare models without reading their weights."""

import hashlib
from pathlib import Path
from typing import Final

from mlx_dp.proto.errors import ConfigError

_LENGTH_NBYTES: Final = 8
_MAX_HEADER_NBYTES: Final = 100 * 2**20
"""The limit of safetensors itself."""


def model_fingerprint(directory: Path) -> str:
    """Hash the configuration, the code, and each weight file's name, size and tensor table.

    Raises ConfigError when the directory holds no model.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update((directory / "config.json").read_bytes())
        weights = sorted(directory.glob("*.safetensors"))
        for path in weights:
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(_header(path))
        for path in sorted(directory.glob("*.py")):
            # Code that comes with the model is part of it.
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    except OSError as error:
        raise ConfigError(f"no model can be read from {directory}: {error}") from None
    if not weights:
        raise ConfigError(f"no model can be read from {directory}: it holds no .safetensors file")
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
        return file.read(min(length, _MAX_HEADER_NBYTES))
