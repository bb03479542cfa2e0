"""The HTTP server inside our own event loop."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

# Routers keep connections open between requests; one that we close first is a failed request.
_KEEP_ALIVE_S: Final = 120
# Answers were drained or cancelled before, so that only their last bytes are under way.
_LAST_BYTES_S: Final = 5


class EmbeddedServer:
    """Serves an ASGI app on a socket that is bound already."""

    def __init__(self, app: Any, listener: socket.socket, *, access_log: bool) -> None:
        self._listener = listener
        self._server = _SignalFreeServer(
            uvicorn.Config(
                app,
                # Measured: with httptools a header without end is buffered without end.
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=access_log,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_BYTES_S,
            )
        )

    async def run(self) -> None:
        """Serve until ``stop``."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Close the socket and let the last answers leave. Idempotent."""
        self._server.should_exit = True


class _SignalFreeServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals mean a drain here, which uvicorn knows nothing of.
        yield
