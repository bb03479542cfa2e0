"""Logs and workers' lines on one console, so that they never tear the start display."""

import logging
import sys

from rich.console import Console


class StderrConsole(Console):
    """Standard error, which the service outlives: rich would exit when its reader is gone."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def write_plain(console: Console, line: str) -> None:
    """Print a line as it is: whatever stands in it, and however long it is."""
    try:
        console.print(line, markup=False, highlight=False, soft_wrap=True, emoji=False)
    except OSError:
        # The terminal or the disk behind it is gone. Serving goes on; there is nobody to tell.
        console.quiet = True


class ConsoleHandler(logging.Handler):
    """Writes each record as one line, above whatever is live on the console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        write_plain(self._console, self.format(record))


def configure_logging(console: Console, level: str) -> None:
    """Send the logs of ours and of the HTTP server to the console, once per process."""
    handler = ConsoleHandler(console)
    # Requests are logged at level info, which is too much unless asked for.
    theirs = "info" if level == "debug" else "warning"
    for name, least in (("mlx_dp", level), ("uvicorn", theirs), ("asyncio", "warning")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least.upper())
