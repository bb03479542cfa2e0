"""Logs and worker output on one console, so that they do not break up the start display."""

import logging
import re
import sys
import traceback
from types import MappingProxyType
from typing import Final

from rich.console import Console

# Control characters, line and paragraph separators, bidirectional marks, and surrogates, which
# no encoding can write.
_NOT_SHOWN: Final = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MESSAGE_ONLY: Final = MappingProxyType(
    {"args": (), "exc_info": None, "exc_text": None, "stack_info": None}
)


class StderrConsole(Console):
    """Standard error; unlike rich's, it goes on after a broken pipe, and so does the service."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr)

    def on_broken_pipe(self) -> None:
        self.quiet = True


def write_plain(console: Console, line: str) -> None:
    """Print one line of any length and content."""
    _write(console, one_line(line))


def one_line(text: str) -> str:
    """Escape characters that end the line, move the cursor or hide text: clients choose names."""
    return _NOT_SHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


class ConsoleHandler(logging.Handler):
    """Writes each record above the live display of the console.

    Logged text cannot imitate a record: a message is one line, and each line of a traceback
    begins with a mark.
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
            # There is no live display here, and rich, which measures and styles each line, would
            # take too much of the event loop's time when a worker floods the log.
            console.file.write(f"{text}\n")
            console.file.flush()
    except OSError:
        # The terminal or disk behind it is gone. Serving goes on.
        console.quiet = True


def configure_logging(console: Console, level: str) -> None:
    """Send our logs and those of the HTTP server to the console. Call it once per process."""
    handler = ConsoleHandler(console)
    # uvicorn logs each request at level info and each malformed one as a warning: too much by
    # default.
    theirs = "info" if level == "debug" else "error"
    for name, least in (("mlx_dp", level), ("uvicorn", theirs), ("asyncio", "warning")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least.upper())
