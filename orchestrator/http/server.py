"""The HTTP server inside our own event loop."""

import asyncio
import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from mlx_dp.orchestrator.http.client_clock import ClientTimeouts
from mlx_dp.orchestrator.http.client_protocol import GuardedProtocol, GuardedState
from mlx_dp.orchestrator.http.clients import Clients
from mlx_dp.orchestrator.http.edge import MAX_HEAD_NBYTES
from mlx_dp.orchestrator.options import HttpOptions

logger = logging.getLogger(__name__)

# Answers were drained or cancelled before, so that only their last bytes are under way.
_LAST_BYTES_S: Final = 5
# A body that is late is told so by the route that reads it, if one does.
_BODY_GRACE_S: Final = 5.0
# uvicorn ticks ten times a second.
_TICKS_A_SWEEP: Final = 10
_SAY_AGAIN_S: Final = 10.0


class EmbeddedServer:
    """Serves an ASGI app on a socket that is bound already."""

    def __init__(
        self, app: Any, listener: socket.socket, options: HttpOptions, *, access_log: bool
    ) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            # Built on h11. Measured: with httptools a header without end is buffered without end.
            http=GuardedProtocol,
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
        self._server = _Server(config, GuardedState(Clients(options.max_connections), timeouts))

    async def run(self) -> None:
        """Serve until ``stop``."""
        asyncio.get_running_loop().set_exception_handler(_LoopErrors())
        server_log = logging.getLogger("uvicorn.error")
        server_log.addFilter(is_no_cut_request)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            server_log.removeFilter(is_no_cut_request)

    def stop(self) -> None:
        """Close the socket and let the last answers leave. Idempotent."""
        self._server.should_exit = True


def is_no_cut_request(record: logging.LogRecord) -> bool:
    """Whether a record says more than that the end of the service cut a request.

    uvicorn counts those in one line, and then gives a traceback of each as an application's error.
    """
    return record.exc_info is None or not _is_cancelled(record.exc_info[1])


def _is_cancelled(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancelled, error.exceptions))
    return isinstance(error, asyncio.CancelledError)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: GuardedState) -> None:
        super().__init__(config)
        self.server_state = state
        self._clients = state.clients

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_A_SWEEP == 0:
            self._clients.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals mean a drain here, which uvicorn knows nothing of.
        yield


class _LoopErrors:
    """Has asyncio report errors, but not each of thousands of refused connections."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Out of descriptors, asyncio tries to accept as often as its backlog is long, each second.
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + _SAY_AGAIN_S
            logger.warning("no connection can be accepted: %s", context.get("exception"))
