"""Text output over a file descriptor that never fails, for both processes.

Imports no module of ours: both programs need it before anything else is loaded.
"""

import io
import os
from typing import Final


class DescriptorText(io.TextIOBase):
    """The attributes that ``sys.stderr`` needs. Subclasses add ``write``."""

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor: Final = descriptor
        self._encoding: Final = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


def dropped_words(lines: int) -> str:
    """Return the beginning of a notice that replaces dropped lines."""
    return "1 line was dropped here" if lines == 1 else f"{lines} lines were dropped here"
