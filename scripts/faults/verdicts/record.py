"""The record of a violation: its text on the screen, and a file with the full log."""

import sys
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Final

MOST_FILES: Final = 20
"""Files per row: when a service is broken, every request is a violation with its log."""


class ViolationRecord:
    """Writes one file per violation of one row; without a violation, none.

    ``again``: the command that repeats the row.
    """

    def __init__(self, directory: Path, row: str, seed: int, again: str) -> None:
        self._directory: Final = directory
        self._row: Final = row
        self._seed: Final = seed
        self._again: Final = again
        self._written = 0

    def write(self, violations: Sequence[str], log: Iterable[str]) -> None:
        """Write the violations that are not written yet."""
        fresh = violations[self._written :]
        if not fresh:
            return
        log_text = "\n".join(log)
        self._directory.mkdir(parents=True, exist_ok=True)
        for text in fresh:
            self._written += 1
            if self._written > MOST_FILES:
                continue
            path = self._free_path()
            path.write_text(f"{text}\n\nagain: {self._again}\n\nlog of the services:\n{log_text}\n")
            print(f"violation: {text}\n  see {path}", file=sys.stderr, flush=True)

    def _free_path(self) -> Path:
        """Violations of earlier runs stay."""
        names = (f"{self._row}-seed{self._seed}-{number}.txt" for number in count(1))
        return next(path for name in names if not (path := self._directory / name).exists())
