"""Log lines of the HTTP server itself."""

import asyncio
import logging

from mlx_dp.orchestrator.http.connection.server import is_not_cut_request


def record_of(error: BaseException | None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "words", (), info)


def test_a_request_that_the_end_of_the_service_cuts_is_no_error() -> None:
    cut = asyncio.CancelledError("timeout graceful shutdown exceeded")
    assert not is_not_cut_request(record_of(cut))
    assert not is_not_cut_request(record_of(BaseExceptionGroup("", [cut, cut])))
    assert is_not_cut_request(record_of(None))
    assert is_not_cut_request(record_of(RuntimeError("ours")))
    assert is_not_cut_request(record_of(BaseExceptionGroup("", [cut, RuntimeError("ours")])))
