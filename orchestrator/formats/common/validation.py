"""Types and checks of request fields with pydantic: errors show the value at fault.

Values are not converted, except that an integral float counts as an integer, as in JSON itself:
JavaScript and YAML clients send them. A boolean or a string is never a number.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError
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


def integral(value: object) -> object:
    """Convert an integral float to an integer, and return anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def same_value(one: object, other: object) -> bool:
    """Whether two JSON values are equal: 1.0 is 1, but true is not."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _minus_one(value: int | None) -> int | None:
    return None if value == -1 else value


def _token_bound(value: int | None) -> int | None:
    if value == 0:
        raise refuse("input should be at least 1, or -1 for as many as fit")
    return _minus_one(value)


def _zero(value: float | None) -> float | None:
    return None if value == 0 else value


def _empty_text(value: object) -> object:
    return None if value == "" else value


def _empty_list(value: object) -> object:
    return None if value == [] else value


def _false(value: object) -> object:
    return None if value is False else value


INTEGRAL: Final = BeforeValidator(integral)
MINUS_ONE_IS_ZERO: Final = AfterValidator(lambda value: max(0, value))
# Each wraps an optional type, and turns equivalents of null into null.
MINUS_ONE_IS_UNSET: Final = AfterValidator(_minus_one)
TOKEN_BOUND: Final = AfterValidator(_token_bound)
ZERO_IS_UNSET: Final = AfterValidator(_zero)
EMPTY_TEXT_IS_UNSET: Final = BeforeValidator(_empty_text)
EMPTY_LIST_IS_UNSET: Final = BeforeValidator(_empty_list)
FALSE_IS_UNSET: Final = BeforeValidator(_false)
