"""The app on a loopback port of its own, for tests that need real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from scripted_service import OPTIONS

from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.service import Service
from mlx_dp.orchestrator.text.fake_tokenizer import fake_text_model


@asynccontextmanager
async def served(service: Service, options: HttpOptions = OPTIONS) -> AsyncIterator[int]:
    """The app on a loopback port of its own."""
    app = create_app(service, options, fake_text_model(512))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    # serve() would take over the signals of the test run.
    task = asyncio.create_task(server._serve())
    while not server.started:
        assert not task.done(), task
        await asyncio.sleep(0)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
