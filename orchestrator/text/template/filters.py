"""Limits on filters and tests: jinja2's own, wrapped to check their input first."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MappingProxyType, NoneType
from typing import Any, Final

from jinja2.exceptions import FilterArgumentError

from mlx_dp.orchestrator.text.template.budget import (
    MAX_DEPTH,
    NODE_COST,
    SMALL,
    TemplateLimitError,
    budget,
)
from mlx_dp.orchestrator.text.template.operations import (
    MAX_INTEGER_BITS,
    check_join,
    check_percent,
    check_product,
    check_replacement,
    check_unknown,
    gathered,
)

Function = Callable[..., Any]
# Gets the arguments of the template; returns a replacement for the first one.
Check = Callable[[list[Any], Mapping[str, Any]], Any]

_ITEM_COST: Final = 4 * NODE_COST
_DIGITS_OF_A_BIT: Final = 1 / 4
_SCALARS: Final = frozenset({int, bool, float, NoneType})
# These look at a value, or at one item of it.
_FREE: Final = frozenset(
    [
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "random",
        "safe",
        "filesizeformat",
    ]
)
# These return lazy iterators.
_LAZY: Final = frozenset(["map", "reject", "rejectattr", "select", "selectattr", "unique"])
# Work and maximal size of the result, by the size of the input.
_FACTORS: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("capitalize", "float", "lower", "string", "striptags", "upper"), 1),
        **dict.fromkeys(("title", "truncate", "wordcount"), 4),
        **dict.fromkeys(("e", "escape", "forceescape"), 5),
        "urlencode": 12,
        **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), 16),
        "pprint": 64,
    }
)
_COMPARISONS: Final = frozenset(
    [
        "==",
        "!=",
        "<",
        "<=",
        ">",
        ">=",
        "eq",
        "equalto",
        "ge",
        "greaterthan",
        "gt",
        "in",
        "le",
        "lessthan",
        "lt",
        "ne",
    ]
)


def bounded_filter(name: str, original: Function) -> Function:
    """Return the filter with its limits."""
    if name in _FREE or name == "tojson":
        return original
    if name in _LAZY:
        return _checked(original, _lazily)
    factor = _FACTORS.get(name)
    if factor is not None:
        return _checked(original, lambda given, _: _measured(given[0], factor), one_is_cheap=True)
    return _checked(original, _CHECKS.get(name, _unknown), one_is_cheap=name == "trim")


def bounded_test(name: str, original: Function) -> Function:
    """Return the test with its limits."""
    if name in _COMPARISONS:
        return _checked(original, _compared)
    if name in ("divisibleby", "even", "odd"):
        return _checked(original, _divided)
    return original


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` as in transformers: no HTML escapes, and no ASCII escapes."""
    limits = budget()
    size = limits.measure(value)
    if size > SMALL:
        limits.spend(size)
    wide = isinstance(separators, tuple | list) and any(len(part) > SMALL for part in separators)
    if indent is None and not wide:
        made = json.dumps(
            value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys
        )
        limits.make(len(made))
        return made
    limits.make(MAX_DEPTH * (indent if isinstance(indent, int) else len(indent or "")))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(gathered(encoder.iterencode(value)))


def counted(items: Any, cost: int) -> Any:
    """Wrap the iterable of a loop, so that each iteration spends this cost."""
    try:
        length = len(items)
    except TypeError:
        return _counting(items, cost) if isinstance(items, Iterator) else items
    if length * cost <= _ITEM_COST * SMALL:
        budget().spend(length * cost)
        return items
    return _Counted(items, cost)


class _Counted:
    """Spends the cost of each item as it is taken."""

    __slots__ = ("_cost", "_items")

    def __init__(self, items: Any, cost: int) -> None:
        self._items = items
        self._cost = cost

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counting(self._items, self._cost)


def _counting(items: Any, cost: int) -> Iterator[Any]:
    spend = budget().spend
    for item in items:
        spend(cost)
        yield item


def _checked(original: Function, check: Check, *, one_is_cheap: bool = False) -> Function:
    """Wrap a function. ``one_is_cheap``: a single short text needs no check."""
    # jinja2 puts its own argument before the template's, if the function asks for one.
    start = 0 if getattr(original, "jinja_pass_arg", None) is None else 1

    # It also copies the marks by which jinja2 knows what to pass.
    @wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if one_is_cheap and len(args) == start + 1 and not kwargs:
            value = args[start]
            if type(value) is str and len(value) <= SMALL:
                return original(*args)
        if len(args) > start:
            args = (*args[:start], check(list(args[start:]), kwargs), *args[start + 1 :])
        return original(*args, **kwargs)

    return bounded


def _measured(value: Any, factor: int) -> Any:
    if type(value) is str and len(value) <= SMALL:
        return value
    if isinstance(value, Iterator):
        return gathered(value)
    limits = budget()
    size = limits.measure(value)
    limits.spend(size * factor)
    return value


def _shallow(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """For filters whose result holds the same items once more."""
    value = given[0]
    if isinstance(value, Iterator):
        return gathered(value)
    if hasattr(value, "__len__"):
        budget().make(len(value))
    return value


def _lazily(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return counted(given[0], _ITEM_COST)


def _unknown(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    check_unknown(given, kwargs)
    return gathered(given[0]) if isinstance(given[0], Iterator) else given[0]


def _compared(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    for other in (*given[1:2], *kwargs.values()):
        weighed(other)
    return given[0]


def weighed(value: Any) -> Any:
    """Spend the size of a value, before it is compared or searched; return it."""
    kind = type(value)
    if kind not in _SCALARS:
        size = len(value) if kind is str else budget().measure(value)
        if size > SMALL:
            budget().spend(size)
    return value


def _divided(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    # For a string, % is formatting.
    if isinstance(given[0], str | bytes):
        check_percent(given[0], given[1] if len(given) > 1 else 2)
    return given[0]


def _arguments(names: str, given: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names.split(), given[1:], strict=False)), **kwargs}


def _trim(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    value = given[0]
    if isinstance(value, str):
        if len(value) > SMALL or len(given) > 1 or kwargs:
            check_product(value, _arguments("chars", given, kwargs).get("chars"))
        return value
    return _measured(value, 1)


def _replace(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    _measured(given[0], 1)
    named = _arguments("old new count", given, kwargs)
    check_replacement(str(given[0]), named.get("old"), named.get("new"))
    return given[0]


def _join(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    separator = _arguments("d attribute", given, kwargs).get("d", "")
    return check_join(separator if isinstance(separator, str) else "", given[0])


def _format(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(given[0], str):
        check_percent(given[0], dict(kwargs) or tuple(given[1:]))
        return given[0]
    return _unknown(given, kwargs)


def _center(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    width = _arguments("width", given, kwargs).get("width", 80)
    budget().make(width if isinstance(width, int) else 0)
    return _measured(given[0], 1)


def _indent(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    width = _arguments("width first blank", given, kwargs).get("width", 4)
    text = given[0]
    if not isinstance(text, str):
        # jinja2's own filter fails too, but only after it has appended a line break to the list.
        raise FilterArgumentError(f"indent needs a text, not {type(text).__name__}")
    size = width if isinstance(width, int) else len(str(width))
    budget().make(len(text) + (1 + len(text.splitlines())) * max(size, 0))
    return text


def _wordwrap(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    names = "width break_long_words wrapstring break_on_hyphens"
    breaks = _arguments(names, given, kwargs).get("wrapstring") or "\n"
    limits = budget()
    size = limits.measure(given[0])
    limits.make(size * (1 + limits.measure(breaks)))
    # It cuts lines in Python code.
    limits.spend(size * 16)
    return given[0]


def _portions(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    named = _arguments("count fill_with", given, {**kwargs})
    count = named.get("count", named.get("linecount", named.get("slices", 1)))
    filled = budget().measure(named.get("fill_with"))
    budget().make((count if isinstance(count, int) else 1) * filled)
    return counted(given[0], _ITEM_COST)


def _sum(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    start = _arguments("attribute start", given, kwargs).get("start", 0)
    if isinstance(start, list | tuple):
        # Each step copies everything before it.
        items = list(gathered(given[0])) if isinstance(given[0], Iterator) else given[0]
        size = budget().measure(items) + budget().measure(start)
        budget().make(size)
        budget().spend(size * len(items) // 8)
        return items
    return _shallow(given, kwargs)


def _int(given: list[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(given[0], str | bytes) and len(given[0]) > MAX_INTEGER_BITS * _DIGITS_OF_A_BIT:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")
    return given[0]


_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "batch": _portions,
        "center": _center,
        "format": _format,
        "indent": _indent,
        "int": _int,
        "join": _join,
        "list": _shallow,
        "replace": _replace,
        "reverse": _shallow,
        "slice": _portions,
        "sum": _sum,
        "trim": _trim,
        "wordwrap": _wordwrap,
    }
)
