"""Logs on the console: whole lines, unchanged, in any state of the reader."""

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from mlx_dp.orchestrator.process.log_output import StderrConsole, configure_logging, write_plain


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("mlx_dp", "uvicorn", "asyncio")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_are_neither_wrapped_nor_interpreted() -> None:
    output = io.StringIO()
    line = "[bold]x[/bold] :smile: " + "long " * 50
    write_plain(Console(file=output, width=20), line)
    assert output.getvalue() == line + "\n"


def test_records_are_one_line_with_their_origin() -> None:
    output = io.StringIO()
    configure_logging(Console(file=output), "info")
    logging.getLogger("mlx_dp.orchestrator.x").info("worker %s: ready", 3)
    logging.getLogger("mlx_dp.orchestrator.x").debug("hidden")
    (line,) = output.getvalue().splitlines()
    assert line.endswith("INFO mlx_dp.orchestrator.x: worker 3: ready")


@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_requests_are_logged_only_when_asked_for(level: str, shown: bool) -> None:
    output = io.StringIO()
    configure_logging(Console(file=output), level)
    logging.getLogger("uvicorn.access").info("GET /health")
    assert ("GET /health" in output.getvalue()) is shown


class Gone(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), OSError(5, "I/O error")])
def test_a_reader_that_is_gone_ends_only_the_log(error: OSError) -> None:
    console = StderrConsole()
    console.file = Gone(error)
    write_plain(console, "one")
    write_plain(console, "two")
    assert console.quiet


FORGED = "x\n2026-01-01 00:00:00 ERROR mlx_dp: forged\r\x1b[2K\u2028\u202e\x9b1m\x00\ud800é 😀"


def test_what_strangers_send_cannot_forge_a_line() -> None:
    output = io.StringIO()
    configure_logging(Console(file=output, width=20), "info")
    logging.getLogger("mlx_dp.orchestrator.x").warning("name %s", FORGED)
    write_plain(Console(file=output, width=20), f"worker 0: {FORGED}")
    first, second, rest = output.getvalue().split("\n")
    assert rest == ""
    escaped = "x\\n2026-01-01 00:00:00 ERROR mlx_dp: forged\\r\\x1b[2K\\u2028\\u202e\\x9b1m\\x00"
    for line in (first, second):
        assert escaped in line
        assert line.endswith("\\ud800é 😀")


def test_no_line_of_a_traceback_looks_like_a_record() -> None:
    output = io.StringIO()
    configure_logging(Console(file=output, width=20), "info")
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("mlx_dp.orchestrator.x").exception("it broke %d%%", 5)
    first, *rest = output.getvalue().splitlines()
    assert first.endswith("ERROR mlx_dp.orchestrator.x: it broke 5%")
    assert any("Traceback" in line for line in rest)
    assert any("forged" in line for line in rest)
    assert all(line.startswith("  | ") and "\x1b" not in line for line in rest)


def test_warnings_that_any_stranger_can_cause_are_not_shown() -> None:
    output = io.StringIO()
    configure_logging(Console(file=output), "info")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").error("Exception in ASGI application")
    assert output.getvalue().count("\n") == 1
