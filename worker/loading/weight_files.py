"""Checks from their headers that a model's weight files are complete, before anything is loaded."""

import json
from pathlib import Path
from typing import Any, Final

from mlx_dp.proto.errors import ConfigError

_SIZE_NBYTES: Final = 8
"""A safetensors file starts with the size of its header, which has each tensor's position."""
_LFS: Final = b"version https://git-lfs"
_MAX_HEADER_NBYTES: Final = 100_000_000
"""The format's own limit. Text in place of weights reads as a much larger one."""


def check_weight_files(directory: Path) -> None:
    """Raise ConfigError for a file that ends before its last tensor, as after a broken download.

    MLX refuses such a file too, but names neither the file nor the missing bytes.
    """
    for path in sorted(directory.glob("model*.safetensors")):
        actual = path.stat().st_size
        missing = _wanted_nbytes(path, actual) - actual
        if missing > 0:
            raise ConfigError(
                f"{path} is incomplete, {missing} bytes are missing at its end: copy or download "
                "it again"
            )


def _wanted_nbytes(path: Path, actual: int) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_SIZE_NBYTES), "little")
        begin = _SIZE_NBYTES + size
        if actual < begin and size <= _MAX_HEADER_NBYTES:
            return begin
        header = file.read(size) if size <= _MAX_HEADER_NBYTES else b""
    try:
        entries: dict[str, Any] = json.loads(header)
        ends = [
            int(entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        remedy = "run git lfs pull" if _is_pointer(path) else "copy or download it again"
        raise ConfigError(
            f"{path} is not a safetensors file: its header cannot be read: {remedy}"
        ) from error
    return begin + max(ends, default=0)


def _is_pointer(path: Path) -> bool:
    """Whether the file is a pointer that Git leaves without its LFS extension."""
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS
