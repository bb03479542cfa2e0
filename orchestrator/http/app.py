"""The ASGI application: all routes, behind the middleware."""

from collections.abc import Callable
from importlib.metadata import version

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mlx_dp.orchestrator.api import Service
from mlx_dp.orchestrator.formats.table import FormatTable, api_formats
from mlx_dp.orchestrator.http.connection.while_connected import while_connected
from mlx_dp.orchestrator.http.errors import install_error_handlers
from mlx_dp.orchestrator.http.middleware import CloseWhenDraining, RequestMiddleware
from mlx_dp.orchestrator.http.openapi import install_document
from mlx_dp.orchestrator.http.routes.administration import flush_cache, restart_worker, workers
from mlx_dp.orchestrator.http.routes.context import AppContext
from mlx_dp.orchestrator.http.routes.generation import GenerationRoute
from mlx_dp.orchestrator.http.routes.health import health, health_generate, live
from mlx_dp.orchestrator.http.routes.histograms import RequestHistograms
from mlx_dp.orchestrator.http.routes.loads import get_load, loads
from mlx_dp.orchestrator.http.routes.metrics import CONTENT_TYPE, Metrics
from mlx_dp.orchestrator.http.routes.models import (
    model,
    model_info,
    models,
    server_info,
    server_version,
)
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.text_model import TextModel


def create_app(
    service: Service,
    options: HttpOptions,
    text: TextModel,
    *,
    dropped_lines: Callable[[], int] = lambda: 0,
    formats: FormatTable | None = None,
) -> FastAPI:
    """Build the application. It holds no resources, so it needs no start and no stop.

    ``dropped_lines`` counts log lines that were dropped, for metrics. ``formats`` are the API
    formats to speak, by default all of them.
    """
    context = AppContext(service=service, text=text, options=options, dropped_lines=dropped_lines)
    formats = formats or api_formats()
    app = _App(context, formats)
    install_error_handlers(app, formats)
    _add_generation(app, context, formats)
    _add_health(app, context)
    _add_metadata(app, context)
    _add_administration(app, context)
    install_document(app, formats)
    return app


class _App(FastAPI):
    """Puts the middleware outside of everything: FastAPI would put it inside its error handler."""

    def __init__(self, context: AppContext, formats: FormatTable) -> None:
        super().__init__(
            title="mlx-dp",
            version=version("mlx-dp"),
            # The pages would load scripts from other sites; the document itself is served.
            docs_url=None,
            redoc_url=None,
            # The middleware normalizes paths, and a redirect would lose the body of a POST.
            redirect_slashes=False,
        )
        self._context = context
        self._formats = formats

    def build_middleware_stack(self) -> ASGIApp:
        context = self._context
        routes = (route.path for route in self.routes if isinstance(route, Route))
        checked = RequestMiddleware(
            super().build_middleware_stack(),
            context.options,
            self._formats,
            context.post_statuses,
            routes,
        )
        return CloseWhenDraining(checked, context.service)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _add_generation(app: FastAPI, context: AppContext, formats: FormatTable) -> None:
    for endpoint in formats.endpoints:
        app.add_api_route(
            endpoint.path,
            GenerationRoute(context, endpoint).respond,
            methods=["POST"],
            name=endpoint.name,
            description=endpoint.description,
        )


def _add_health(app: FastAPI, context: AppContext) -> None:
    # HAProxy checks with OPTIONS by default.
    methods = ["GET", "OPTIONS"]

    @app.api_route("/live", methods=methods, include_in_schema=False)
    async def live_route() -> Response:
        return live()

    @app.api_route("/health", methods=methods, include_in_schema=False)
    async def health_route() -> Response:
        return health(context)

    @app.get("/health_generate")
    async def health_generate_route(request: Request, dp_rank: str | None = None) -> Response:
        return await while_connected(request.receive, health_generate(context, dp_rank))

    histograms = RequestHistograms()
    context.service.observe(histograms)
    context.service.observe(context.queue_pace)
    metrics = Metrics(context, histograms)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)


def _add_metadata(app: FastAPI, context: AppContext) -> None:
    @app.get("/v1/models")
    async def models_route() -> Response:
        return _json(models(context))

    # Served names may contain slashes.
    @app.get("/v1/models/{name:path}")
    async def model_route(name: str) -> Response:
        return _json(model(context, name))

    @app.get("/v1/loads")
    async def loads_route() -> Response:
        return _json(loads(context))

    @app.get("/get_load")
    async def get_load_route() -> Response:
        return _json(get_load(context))

    @app.get("/version")
    async def server_version_route() -> Response:
        return _json(server_version())

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info_route() -> Response:
        return _json(server_info(context))

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info_route() -> Response:
        return _json(model_info(context))


def _add_administration(app: FastAPI, context: AppContext) -> None:
    # Both, as SGLang.
    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache_route() -> Response:
        return await flush_cache(context)

    @app.get("/workers")
    async def workers_route() -> Response:
        return _json(workers(context))

    @app.post("/workers/{name}/restart", status_code=202)
    async def restart_worker_route(name: str) -> Response:
        return restart_worker(context, name)
