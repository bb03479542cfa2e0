"""Progress of long preparations: a bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars


class Progress(Protocol):
    """Receives the progress of one stage after another. ``total`` is 0 while unknown."""

    def update(self, stage: str, done: int, total: int) -> None: ...


class LineProgress:
    """One line when a stage starts and one when it is complete, for logs and pipes."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._stage: str | None = None
        self._complete = False

    def update(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage, self._complete = stage, False
            print(f"{stage} ...", file=self._output, flush=True)
        if total and done >= total and not self._complete:
            self._complete = True
            print(f"{stage}: done", file=self._output, flush=True)


class BarProgress:
    """A bar for the current stage, below those of finished stages."""

    def __init__(self, bars: RichBars) -> None:
        self._bars = bars
        self._stage: str | None = None
        self._task: TaskID | None = None

    def update(self, stage: str, done: int, total: int) -> None:
        if self._task is None or stage != self._stage:
            self._stage = stage
            self._task = self._bars.add_task(stage, total=None)
        self._bars.update(self._task, completed=done, total=total or None)


@contextmanager
def terminal_progress(output: TextIO | None = None) -> Iterator[Progress]:
    """Show the display that suits ``output`` (default: stderr) until the block ends."""
    output = output or sys.stderr
    if not output.isatty():
        yield LineProgress(output)
        return
    # The stage may contain a model's name, which must not be read as markup.
    stage = TextColumn("{task.description}", markup=False)
    columns = (stage, BarColumn(), TimeRemainingColumn())
    with RichBars(*columns, console=Console(file=output)) as bars:
        yield BarProgress(bars)
