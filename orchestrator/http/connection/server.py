"""The HTTP server, embedded in the controller's event loop."""

import asyncio
import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from mlx_dp.orchestrator.formats.table import api_formats
from mlx_dp.orchestrator.http.connection.client_clock import ClientTimeouts
from mlx_dp.orchestrator.http.connection.client_protocol import (
    MAX_HEAD_NBYTES,
    ClientProtocol,
    SharedState,
)
from mlx_dp.orchestrator.http.connection.connection_table import ConnectionTable
from mlx_dp.orchestrator.options import HttpOptions

logger = logging.getLogger(__name__)

# Responses were drained or cancelled before, so only their last bytes are unsent.
_LAST_BYTES_S: Final = 5
# The route that reads a body sends a 408 first, if there is one.
_BODY_GRACE_S: Final = 5.0
# uvicorn ticks ten times a second.
_TICKS_A_SWEEP: Final = 10
_LOG_AGAIN_S: Final = 10.0


class EmbeddedServer:
    """Serves an ASGI app on a socket that is bound already."""

    def __init__(
        self, app: Any, listener: socket.socket, options: HttpOptions, *, access_log: bool
    ) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            # Built on h11: httptools was measured to buffer an endless header without a bound.
            http=ClientProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_NBYTES,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=access_log,
            server_header=False,
            timeout_keep_alive=math.ceil(options.idle_timeout_s),
            timeout_graceful_shutdown=_LAST_BYTES_S,
        )
        timeouts = ClientTimeouts(
            idle_s=options.idle_timeout_s,
            head_s=options.head_timeout_s,
            body_s=options.body_timeout_s + _BODY_GRACE_S,
            send_s=options.send_timeout_s,
        )
        connections = ConnectionTable(options.max_connections)
        state = SharedState(connections, timeouts, api_formats().default)
        self._server = _Server(config, state)

    async def run(self) -> None:
        """Serve until ``stop``."""
        asyncio.get_running_loop().set_exception_handler(_LoopErrors())
        server_log = logging.getLogger("uvicorn.error")
        server_log.addFilter(is_not_cut_request)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            server_log.removeFilter(is_not_cut_request)

    def stop(self) -> None:
        """Close the socket and let the last responses end. Idempotent."""
        self._server.should_exit = True


def is_not_cut_request(record: logging.LogRecord) -> bool:
    """Whether a record is about anything but a request that the shutdown cut.

    uvicorn counts those in one line, and then logs a traceback of each as an application's error.
    """
    return record.exc_info is None or not _is_cancelled(record.exc_info[1])


def _is_cancelled(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancelled, error.exceptions))
    return isinstance(error, asyncio.CancelledError)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: SharedState) -> None:
        super().__init__(config)
        self.server_state = state
        self._connection_table = state.connection_table

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_A_SWEEP == 0:
            self._connection_table.check_deadlines(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The controller handles signals: they start a drain.
        yield


class _LoopErrors:
    """Reports asyncio's errors, but not each of thousands of refused connections."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Without free descriptors, asyncio retries once for each place of its backlog, each second.
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + _LOG_AGAIN_S
            logger.warning("no connection can be accepted: %s", context.get("exception"))
