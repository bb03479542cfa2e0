"""Field types for numbers, and for values that mean "unset".

An integral float counts as an integer, as in JSON itself: JavaScript and YAML clients send them.
A boolean or a string is never a number.
"""

from typing import Final

from pydantic import AfterValidator, BeforeValidator

from mlx_dp.orchestrator.formats.common.validation import refuse


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
