"""Turns errors into answers in OpenAI's shape; nobody outside learns more than the message."""

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from mlx_dp.orchestrator.http.body import ClientGoneError
from mlx_dp.orchestrator.openai.errors import ApiError, invalid, overloaded
from mlx_dp.orchestrator.service import CONTEXT_LENGTH_EXCEEDED, OverloadedError, RefusedError

logger = logging.getLogger(__name__)


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")


def from_overloaded(error: OverloadedError) -> ApiError:
    return overloaded(error.status, str(error), retry_after_s=error.retry_after_s)


def from_refused(error: RefusedError, names: Mapping[str, str]) -> ApiError:
    """``names``: what the client calls a field, where that is not our word for it."""
    param = None if error.param is None else names.get(error.param, error.param)
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return too_long(param, str(error))
    return invalid(param, str(error), code=error.code)


def too_long(param: str | None, message: str) -> ApiError:
    """A 400 in OpenAI's words and nothing before them, for clients that read them."""
    return ApiError(400, message, param=param, code=CONTEXT_LENGTH_EXCEEDED)


def internal_error() -> ApiError:
    """Internal server error. The log has the traceback; the client gets no part of it.

    Its connection ends, since what is left of the request is unknown.
    """
    error = ApiError(500, "internal error", code="internal_error")
    error.headers["connection"] = "close"
    return error


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> Response:
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
    answer = ApiError(error.status_code, message, code=code)
    answer.headers.update(error.headers or {})
    allowed = answer.headers.get("Allow", "").split(", ")
    if "GET" in allowed:
        # The edge asks with GET for it.
        answer.headers["Allow"] = ", ".join([*allowed, "HEAD"])
    return error_response(answer)


async def _internal_error(_: Request, __: Exception) -> Response:
    return error_response(internal_error())


async def _client_gone(_: Request, __: Exception) -> Response:
    # Never delivered: the server knows that the connection is closed.
    return Response(status_code=499)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _internal_error)
