"""The ASGI application: all routes, and the parts that every request passes."""

from collections.abc import Callable
from importlib.metadata import version

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mlx_dp.orchestrator.http import cache, health, loads, models, workers
from mlx_dp.orchestrator.http.close_when_draining import CloseWhenDraining
from mlx_dp.orchestrator.http.connection import while_connected
from mlx_dp.orchestrator.http.document import install_document
from mlx_dp.orchestrator.http.edge import Edge
from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.http.errors import install_error_handlers
from mlx_dp.orchestrator.http.generation import GenerationRoutes
from mlx_dp.orchestrator.http.histograms import RequestHistograms
from mlx_dp.orchestrator.http.metrics import CONTENT_TYPE, Metrics
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.service import Service
from mlx_dp.orchestrator.text.text_model import TextModel


def create_app(
    service: Service,
    options: HttpOptions,
    text: TextModel,
    *,
    dropped_lines: Callable[[], int] = lambda: 0,
) -> FastAPI:
    """Build the application. It holds no resources: there is nothing to start or to stop.

    ``dropped_lines``: lines of the log that were not taken, for metrics.
    """
    endpoint = Endpoint(service=service, text=text, options=options, dropped_lines=dropped_lines)
    app = _EdgedApp(endpoint)
    install_error_handlers(app)
    _add_generation(app, endpoint)
    _add_health(app, endpoint)
    _add_metadata(app, endpoint)
    _add_administration(app, endpoint)
    install_document(app)
    return app


class _EdgedApp(FastAPI):
    """Has the edge around everything: FastAPI's own place for it lies within that of errors."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(
            title="mlx-dp",
            version=version("mlx-dp"),
            # The pages would load scripts from elsewhere; the document itself is there.
            docs_url=None,
            redoc_url=None,
            # The edge knows all spellings, and a redirect would lose the body of a POST.
            redirect_slashes=False,
        )
        self._endpoint = endpoint

    def build_middleware_stack(self) -> ASGIApp:
        endpoint = self._endpoint
        routes = (route.path for route in self.routes if isinstance(route, Route))
        edge = Edge(super().build_middleware_stack(), endpoint.options, endpoint.posts, routes)
        return CloseWhenDraining(edge, endpoint.service)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _add_generation(app: FastAPI, endpoint: Endpoint) -> None:
    routes = GenerationRoutes(endpoint)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Text of messages stays text: only the chat template writes control tokens."""
        return await routes.chat(request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Special tokens in a prompt's text count as such, as everywhere on this route."""
        return await routes.completions(request)


def _add_health(app: FastAPI, endpoint: Endpoint) -> None:
    # HAProxy asks with OPTIONS unless told otherwise.
    methods = ["GET", "OPTIONS"]

    @app.api_route("/live", methods=methods, include_in_schema=False)
    async def live_route() -> Response:
        return health.live()

    @app.api_route("/health", methods=methods, include_in_schema=False)
    async def health_route() -> Response:
        return health.health(endpoint)

    @app.get("/health_generate")
    async def health_generate_route(request: Request, dp_rank: str | None = None) -> Response:
        return await while_connected(request.receive, health.health_generate(endpoint, dp_rank))

    histograms = RequestHistograms()
    endpoint.service.observe(histograms)
    endpoint.service.observe(endpoint.pace)
    metrics = Metrics(endpoint, histograms)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)


def _add_metadata(app: FastAPI, endpoint: Endpoint) -> None:
    @app.get("/v1/models")
    async def models_route() -> Response:
        return _json(models.models(endpoint))

    # Served names may contain slashes.
    @app.get("/v1/models/{name:path}")
    async def model_route(name: str) -> Response:
        return _json(models.model(endpoint, name))

    @app.get("/v1/loads")
    async def loads_route() -> Response:
        return _json(loads.loads(endpoint))

    @app.get("/get_load")
    async def get_load_route() -> Response:
        return _json(loads.get_load(endpoint))

    @app.get("/version")
    async def server_version_route() -> Response:
        return _json(models.server_version())

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info_route() -> Response:
        return _json(models.server_info(endpoint))

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info_route() -> Response:
        return _json(models.model_info(endpoint))


def _add_administration(app: FastAPI, endpoint: Endpoint) -> None:
    # SGLang takes both.
    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache_route() -> Response:
        return await cache.flush_cache(endpoint)

    @app.get("/workers")
    async def workers_route() -> Response:
        return _json(workers.workers(endpoint))

    @app.post("/workers/{name}/restart", status_code=202)
    async def restart_worker_route(name: str) -> Response:
        return workers.restart(endpoint, name)
