"""Checks of request fields with pydantic: values are never converted, and errors show them."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from mlx_dp.orchestrator.formats.common.errors import ApiError, invalid, shown, shown_name

STRICT: Final = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def refuse(message: str, *part: object) -> PydanticCustomError:
    """A validator's error, about a part of its input if one is given."""
    # As a value of the template, since braces in the message would be placeholders.
    context = {"message": message}
    if part:
        context["got"] = shown(part[0])
    return PydanticCustomError("refused", "{message}", context)


def from_validation(error: ValidationError) -> ApiError:
    """Return the first fault, with field, value and bound."""
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


def _shown_part(part: int | str) -> str:
    return shown_name(part) if isinstance(part, str) else str(part)
