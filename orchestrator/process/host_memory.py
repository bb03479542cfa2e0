"""The RAM that this process may use: the machine's, or less inside a container."""

from pathlib import Path
from typing import Final

import psutil

_LIMIT_FILES: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def ram_nbytes(limit_files: tuple[Path, ...] = _LIMIT_FILES) -> int:
    """Bytes of RAM, bounded by the control group's limit where there is one."""
    total = int(psutil.virtual_memory().total)
    return min([total, *_limits(limit_files)])


def _limits(files: tuple[Path, ...]) -> list[int]:
    texts = [file.read_text("ascii").strip() for file in files if file.is_file()]
    # "max" means no limit; version 1 writes an absurdly large number instead.
    return [int(text) for text in texts if text.isdigit() and int(text) > 0]
