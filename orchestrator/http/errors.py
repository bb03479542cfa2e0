"""Exception handlers: each error becomes a response in the format of its route."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from mlx_dp.orchestrator.formats.common.api_format import ApiFormat
from mlx_dp.orchestrator.formats.common.errors import ApiError, internal_error
from mlx_dp.orchestrator.formats.table import FormatTable
from mlx_dp.orchestrator.http.connection.while_connected import ClientGoneError


def error_response(error: ApiError, api_format: ApiFormat) -> Response:
    written = api_format.error_response(error)
    return Response(written.body, written.status, error.headers, media_type="application/json")


def install_error_handlers(app: FastAPI, formats: FormatTable) -> None:
    def written(
        to_error: Callable[[Request, Exception], ApiError],
    ) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def handler(request: Request, error: Exception) -> Response:
            api_format = formats.format_for(request.scope["path"])
            return error_response(to_error(request, error), api_format)

        return handler

    app.add_exception_handler(ApiError, written(_api_error))
    app.add_exception_handler(HTTPException, written(_http_exception))
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, written(_any_exception))


def _api_error(_: Request, error: Exception) -> ApiError:
    assert isinstance(error, ApiError)
    return error


def _http_exception(request: Request, error: Exception) -> ApiError:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            code, message = (
                "unknown_route",
                f"there is no route {ascii(request.scope['path'])[:200]}",
            )
        case 405:
            code = "method_not_allowed"
            message = f"{request.method[:16]} is not allowed here, see the Allow header"
        case _:
            code, message = "http_error", str(error.detail)
    found = ApiError(error.status_code, message, code=code)
    found.headers.update(error.headers or {})
    allowed = found.headers.get("Allow", "").split(", ")
    if "GET" in allowed:
        # The middleware turns HEAD into GET.
        found.headers["Allow"] = ", ".join([*allowed, "HEAD"])
    return found


def _any_exception(_: Request, __: Exception) -> ApiError:
    return internal_error()


async def _client_gone(_: Request, __: Exception) -> Response:
    # Never delivered: the server knows that the connection is closed.
    return Response(status_code=499)
