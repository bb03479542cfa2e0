"""How large the values of a template may become. Pure: what would be made is refused before."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

MAX_CHARS: Final = 16 * 2**20
"""The most characters of a rendered prompt, and of each value on the way to it."""
MAX_ITEMS: Final = 2**20
MAX_INTEGER_BITS: Final = 4096
MAX_WIDTH: Final = 9999

# Widths of five digits, and such as come from an argument.
_WIDE_PERCENT: Final = re.compile(r"%[^A-Za-z%]*(?:\*|[0-9]{5})")
_WIDE_BRACES: Final = re.compile(r"(?<!\{)\{(?!\{)[^{}]*(?:\{|[0-9]{5})")
_WIDE_FILTERS: Final = frozenset({"batch", "center", "indent", "slice", "wordwrap"})
_PADDING: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class TemplateLimitError(Exception):
    """The template wants more than a prompt can need."""


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError for an operation whose result would be too large."""
    match operator, left, right:
        case ("*", str() | list() | tuple(), int()) | ("*", int(), str() | list() | tuple()):
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            _check_size(sequence, len(sequence) * times)
        case "*", int(), int():
            _check_bits(left.bit_length() + right.bit_length())
        case "**", int(), int():
            _check_bits(left.bit_length() * abs(right))
        case ("+", str(), str()) | ("+", list() | tuple(), list() | tuple()):
            _check_size(left, len(left) + len(right))
        case "%", str(), _:
            _check_percent(left, right if isinstance(right, tuple) else (right,))


def check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The same for a method of a string; all others make nothing of a size of their own."""
    # The sandbox puts a function of its own around a string's format.
    method = getattr(function, "__wrapped__", function)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str):
        return
    if name in _PADDING:
        _check_widths(args)
        if name == "expandtabs":
            check_text(len(owner) + owner.count("\t") * max(args, default=8))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        check_text(len(owner) * max(map(size_of, args[0].values()), default=1))
    elif name == "replace" and len(args) > 1:
        _check_replacement(owner, args[0], args[1])
    elif name in ("format", "format_map"):
        if _WIDE_BRACES.search(owner):
            raise TemplateLimitError(f"it formats to a width above {MAX_WIDTH}")
        longest = max(map(size_of, (*args, *kwargs.values())), default=0)
        check_text(len(owner) + owner.count("{") * longest)
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_join(owner, args[0])


def check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The same for a filter, without the arguments that jinja2 adds."""
    given = [*args, *kwargs.values()]
    check_text(sum(map(size_of, given)))
    match name, given:
        case "replace", [str(text), old, new, *_]:
            _check_replacement(text, old, new)
        case "join", [list() | tuple() as items, *rest]:
            _check_join("".join(part for part in rest if isinstance(part, str)), items)
        case "format", [str(text), *rest]:
            _check_percent(text, rest)
        case "indent", [str(text), str(width), *_]:
            check_text(len(text) + len(text.splitlines()) * len(width))
        case "wordwrap", [str(text), *rest]:
            breaks = max((len(part) for part in rest if isinstance(part, str)), default=1)
            check_text(len(text) * (1 + breaks))
        case "sum", [_, *rest] if any(isinstance(part, str | list | tuple) for part in rest):
            raise TemplateLimitError("it sums what are no numbers")
    if name in _WIDE_FILTERS:
        _check_widths(given)


def size_of(value: Any) -> int:
    """How long the value is when it is written out, in characters and items.

    A list of lists may hold one and the same a million times. Raises TemplateLimitError when that
    is more than a prompt can need.
    """
    num_chars = num_items = 0
    left = [value]
    while left:
        found = left.pop()
        num_items += 1
        if isinstance(found, str | bytes):
            num_chars += len(found)
        elif isinstance(found, Mapping):
            left += found.keys()
            left += found.values()
        elif isinstance(found, Collection) and not isinstance(found, range):
            left += found
        if num_items > MAX_ITEMS or len(left) > MAX_ITEMS:
            raise TemplateLimitError(f"it makes more than {MAX_ITEMS} items")
    check_text(num_chars)
    return num_chars + num_items


def check_text(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateLimitError(f"it makes more than {MAX_CHARS} characters")


def _check_percent(text: str, args: Iterable[Any]) -> None:
    if _WIDE_PERCENT.search(text):
        raise TemplateLimitError(f"it formats to a width above {MAX_WIDTH}")
    check_text(len(text) + sum(map(size_of, args)))


def _check_widths(args: Iterable[Any]) -> None:
    if any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
        raise TemplateLimitError(f"it pads to a width above {MAX_WIDTH}")


def _check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_text(len(text) + text.count(old) * len(new))


def _check_join(separator: str, items: Sequence[Any]) -> None:
    check_text(sum(map(size_of, items)) + len(separator) * len(items))


def _check_size(value: str | list[Any] | tuple[Any, ...], size: int) -> None:
    if isinstance(value, str):
        check_text(size)
    elif size > MAX_ITEMS:
        raise TemplateLimitError(f"it makes more than {MAX_ITEMS} items")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")
