"""Errors for clients, before an API format gives them its shape."""

from typing import Final

from mlx_dp.orchestrator.api import CONTEXT_LENGTH_EXCEEDED, OverloadedError, RefusedError
from mlx_dp.orchestrator.formats.common.generation_request import FieldNames

MAX_SHOWN: Final = 80


class ApiError(Exception):
    """The request fails with this HTTP status. The message is meant for the client.

    ``param`` is the field at fault, in the client's words. ``code`` names the fault for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 whose message opens with the field at fault."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, value: object, advice: str) -> ApiError:
    """A 400 for a parameter that other servers support."""
    return ApiError(
        400,
        f"{param}: this server does not support it (got {shown(value)}): {advice}",
        param=param,
        code="unsupported_parameter",
    )


def too_long(param: str | None, message: str) -> ApiError:
    """A 400 for a prompt or answer that exceeds the context.

    The message is OpenAI's, without the field before it: clients parse it.
    """
    return ApiError(400, message, param=param, code=CONTEXT_LENGTH_EXCEEDED)


def overloaded(status: int, message: str, *, retry_after_s: int) -> ApiError:
    """A 429 or 503 with Retry-After."""
    error = ApiError(status, message, code="queue_full" if status == 429 else "unavailable")
    error.headers["retry-after"] = str(max(1, retry_after_s))
    return error


def too_large(part: str, max_nbytes: int, *, status: int = 413) -> ApiError:
    """A 413, or a 431 for the head, for a request that exceeds a bound of bytes."""
    return closing(ApiError(status, f"the {part} is larger than {max_nbytes} bytes"))


def closing(error: ApiError) -> ApiError:
    """Return the error with ``Connection: close``, since the rest of the request is not read."""
    error.headers["connection"] = "close"
    return error


def internal_error() -> ApiError:
    """Internal server error. The log has the traceback; the client gets no part of it.

    Its connection ends, since the state of the request is unknown.
    """
    return closing(ApiError(500, "internal error", code="internal_error"))


def from_overloaded(error: OverloadedError) -> ApiError:
    return overloaded(error.status, str(error), retry_after_s=error.retry_after_s)


def from_refused(error: RefusedError, names: FieldNames) -> ApiError:
    """Translate a refusal by the control plane into the client's own field names."""
    param = None if error.param is None else names.client_name(error.param)
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return too_long(param, str(error))
    return invalid(param, str(error), code=error.code)


def shown(value: object) -> str:
    """A value as error messages show it: on one line, and never long."""
    match value:
        case dict():
            return f"an object of {len(value)} members"
        case list() | tuple():
            return f"an array of {len(value)} items"
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if abs(value) >= 10**MAX_SHOWN:
            return "a huge number"
        case _:
            # ascii() escapes newlines and control characters.
            text = ascii(value)
            return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def shown_name(name: str) -> str:
    """A member's name as error messages show it: the client may have made it up."""
    return ascii(name)[1:-1][:MAX_SHOWN]
