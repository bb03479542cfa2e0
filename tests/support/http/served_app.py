"""The app on a loopback port of its own, for tests that need real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlx_dp.orchestrator.api import Service
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.http.connection.listen_socket import bound_port, open_socket
from mlx_dp.orchestrator.http.connection.server import EmbeddedServer
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.text_model import TextModel
from tests.support.http.scripted_service import OPTIONS


@asynccontextmanager
async def served(
    service: Service, options: HttpOptions = OPTIONS, text: TextModel | None = None
) -> AsyncIterator[int]:
    """The app on a loopback port of its own, behind the server that ``mlx-dp serve`` uses."""
    app = create_app(service, options, text or FakeTextModel(512))
    listener = open_socket("127.0.0.1", 0)
    port = bound_port(listener)
    # Without an access log uvicorn silences its logger for the whole process, other tests
    # included.
    server = EmbeddedServer(app, listener, options, access_log=True)
    task = asyncio.create_task(server.run())
    try:
        # Connections wait in the socket's backlog until the server answers.
        yield port
    finally:
        server.stop()
        await task
