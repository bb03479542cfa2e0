"""Logs and workers' lines on one console, so that they never tear the start display."""

import logging
import re
import sys
import traceback
from types import MappingProxyType
from typing import Final

from rich.console import Console

# Controls, line and paragraph separators, marks that turn the direction of text, and halves of
# characters, which no encoding can write.
_NOT_SHOWN: Final = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MESSAGE_ONLY: Final = MappingProxyType(
    {"args": (), "exc_info": None, "exc_text": None, "stack_info": None}
)


class StderrConsole(Console):
    """Standard error, which the service outlives: rich would exit when its reader is gone."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def write_plain(console: Console, line: str) -> None:
    """Print one line, however long it is and whatever stands in it."""
    _write(console, one_line(line))


def one_line(text: str) -> str:
    """Escape what would end the line, move the cursor or hide text: names come from strangers."""
    return _NOT_SHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


class ConsoleHandler(logging.Handler):
    """Writes each record above whatever is live on the console.

    Nothing that is logged can look like a record of its own: a message is one line, and the
    lines of a traceback begin with a mark.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        lines = [one_line(record.getMessage())]
        if record.exc_info:
            trace = "".join(traceback.format_exception(*record.exc_info))
            lines += [f"  | {one_line(line)}" for line in trace.splitlines()]
        shown = logging.makeLogRecord({**record.__dict__, **_MESSAGE_ONLY, "msg": lines[0]})
        _write(self._console, "\n".join([self.format(shown), *lines[1:]]))


def _write(console: Console, text: str) -> None:
    try:
        if console.is_terminal:
            console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)
        else:
            # Elsewhere nothing is live, and a flood of a worker's lines must not take the event
            # loop's time: rich measures and styles each.
            console.file.write(f"{text}\n")
            console.file.flush()
    except OSError:
        # The terminal or the disk behind it is gone. Serving goes on; there is nobody to tell.
        console.quiet = True


def configure_logging(console: Console, level: str) -> None:
    """Send the logs of ours and of the HTTP server to the console, once per process."""
    handler = ConsoleHandler(console)
    # Requests are logged at level info, which is too much unless asked for, and what strangers
    # send is warned of each time.
    theirs = "info" if level == "debug" else "error"
    for name, least in (("mlx_dp", level), ("uvicorn", theirs), ("asyncio", "warning")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least.upper())
