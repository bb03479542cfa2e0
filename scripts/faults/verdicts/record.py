"""What a violation leaves behind: its text on the screen, and a file with all that was said."""

import sys
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Final

MOST_FILES: Final = 20
"""Of one row: when a service is broken, every request is a violation, and each has the log."""


class ViolationRecord:
    """One file a violation, of one row. Nothing is made where nothing is found.

    ``again``: the command that repeats the row.
    """

    def __init__(self, directory: Path, row: str, seed: int, again: str) -> None:
        self._directory: Final = directory
        self._row: Final = row
        self._seed: Final = seed
        self._again: Final = again
        self._written = 0

    def write(self, violations: Sequence[str], log: Iterable[str]) -> None:
        """Take the violations so far, of which some may be written already."""
        fresh = violations[self._written :]
        if not fresh:
            return
        said = "\n".join(log)
        self._directory.mkdir(parents=True, exist_ok=True)
        for text in fresh:
            self._written += 1
            if self._written > MOST_FILES:
                continue
            path = self._free_path()
            path.write_text(f"{text}\n\nagain: {self._again}\n\nthe services said:\n{said}\n")
            print(f"violation: {text}\n  see {path}", file=sys.stderr, flush=True)

    def _free_path(self) -> Path:
        """What earlier runs have found stays."""
        names = (f"{self._row}-seed{self._seed}-{number}.txt" for number in count(1))
        return next(path for name in names if not (path := self._directory / name).exists())
