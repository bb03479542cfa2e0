"""Errors as the OpenAI API shows them."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pydantic import ValidationError

MAX_SHOWN: Final = 80


class ApiError(Exception):
    """The request gets this answer instead of text. The message is meant for the client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}

    @property
    def type(self) -> str:
        match self.status:
            case 401:
                return "authentication_error"
            case 404:
                return "not_found_error"
            case 429 | 503:
                return "overloaded_error"
            case status if status >= 500:
                return "server_error"
            case _:
                return "invalid_request_error"

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": str(self),
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 whose message opens with the field at fault."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, value: object, advice: str) -> ApiError:
    """A 400 for what others can and we cannot."""
    return ApiError(
        400,
        f"{param}: this server does not support it (got {shown(value)}): {advice}",
        param=param,
        code="unsupported_parameter",
    )


def overloaded(status: int, message: str, *, retry_after_s: int) -> ApiError:
    """A 429 or 503 with Retry-After."""
    error = ApiError(status, message, code="queue_full" if status == 429 else "unavailable")
    error.headers["retry-after"] = str(max(1, retry_after_s))
    return error


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
    """A member's name as error messages show it: it may be the client's own."""
    return ascii(name)[1:-1][:MAX_SHOWN]


def _shown_part(part: int | str) -> str:
    return shown_name(part) if isinstance(part, str) else str(part)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong, with field, value and bound."""
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        # The parser quotes no input, but says where it stopped.
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
    param = ".".join(map(_shown_part, first["loc"]))[:256] or None
    if first["type"] == "missing":
        return invalid(param, "this field is required")
    message = str(first["msg"])
    got = first.get("ctx", {}).get("got") or shown(first["input"])
    return invalid(param, f"{message[0].lower()}{message[1:]}, got {got}")
