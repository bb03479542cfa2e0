"""Limits on operators and on methods of built-in types, each checked before it runs.

A single call into C may run for hours or allocate a terabyte, and cannot be stopped.
"""

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Final

from markupsafe import Markup

from mlx_dp.orchestrator.text.template.budget import SMALL, TemplateLimitError, budget

MAX_INTEGER_BITS: Final = 2**14

_ESCAPED: Final = 5
"""The longest HTML escape of one character."""
_ENCODED: Final = 4
_ITEM_COST: Final = 32
_PERCENT: Final = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|[0-9]+)?(?:\.(\*|[0-9]+))?")
_DIGITS: Final = re.compile(r"[0-9]+")
_CODECS: Final = re.compile(r"(?i)utf[-_]?(8|16|32)([-_]?[bl]e)?|ascii|latin[-_]?1")
# Linear in the text, in time and in the size of the result.
_LINEAR: Final = frozenset(
    [
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "partition",
        "removeprefix",
        "removesuffix",
        "split",
        "splitlines",
        "startswith",
        "swapcase",
        "title",
        "upper",
    ]
)
# These compare at each position, from the right or with each of several characters.
_PRODUCT: Final = frozenset(
    ["lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"]
)
_PADDING: Final = frozenset(["center", "ljust", "rjust", "zfill"])
_CHEAP: Final = _LINEAR | _PRODUCT
_OF_MAPPINGS: Final = frozenset(["get", "items", "keys", "values"])


def add(*parts: Any) -> Any:
    """Return ``a + b + c``."""
    size = 0
    for part in parts:
        if type(part) is not str:
            break
        size += len(part)
    else:
        limits = budget()
        if size > SMALL:
            limits.make(size)
        text = "".join(parts)
        limits.origins.joined(text, parts)
        return text
    made = parts[0]
    for part in parts[1:]:
        made = _add(made, part)
    return made


def operate(symbol: str, left: Any, right: Any) -> Any:
    """Return ``left * right``, ``left ** right`` or ``left % right``."""
    match symbol:
        case "*":
            return _multiply(left, right)
        case "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
            return left**right
        case _:
            if isinstance(left, str | bytes):
                check_percent(left, right)
            return left % right


def check_percent(text: str | bytes, args: Any) -> None:
    """Limit ``text % args``."""
    pattern = text if isinstance(text, str) else text.decode("latin-1")
    found = [width for match in _PERCENT.finditer(pattern) for width in match.groups() if width]
    given = args if isinstance(args, tuple) else (args,)
    widths = [_number(width) for width in found if width != "*"]
    if "*" in found:
        widths += [abs(arg) for arg in given if isinstance(arg, int)]
    sizes = sum(map(_written, given))
    if isinstance(args, Mapping):
        sizes *= pattern.count("%")
    budget().make(len(text) + sizes * _factor(text) + sum(widths))


def check_format(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Limit ``text.format(*args, **kwargs)``."""
    given = [*args, *kwargs.values()]
    longest = max(map(_written, given), default=0)
    widest = fields = 0
    for _, field, form, _ in Formatter().parse(text):
        fields += field is not None
        if form and "{" in form:
            widest = max(widest, *map(_widest, given))
        elif form:
            widest = max(widest, _widest(form))
    budget().make(len(text) + fields * (longest * _factor(text) + widest))


def check_join(separator: str, items: Any) -> Any:
    """Limit a join, and return the items to join."""
    if isinstance(items, Iterator):
        return gathered(items, len(separator))
    if hasattr(items, "__len__"):
        budget().make(budget().measure(items) * _factor(separator) + len(separator) * len(items))
    return items


def check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget().make((len(text) + text.count(old) * len(new)) * _factor(text, new))


def check_product(text: str, other: Any) -> None:
    """Limit a search, which compares one value with the other at each position."""
    size = len(text)
    if isinstance(other, str | tuple | list):
        size *= 1 + min(len(other), len(text)) // 16
    budget().spend(size)


def check_unknown(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Limit an unknown call: assume that it takes the square of all sizes and numbers."""
    size = 0
    for arg in (*args, *kwargs.values()):
        size += budget().measure(arg) + (abs(arg) if type(arg) is int else 0)
    budget().spend(size * size)


def gathered(items: Iterator[Any], extra: int = 0) -> Iterator[Any]:
    """Yield the items, as long as all of them together stay within the limit."""
    limits, size = budget(), 0
    for item in items:
        size += limits.measure(item) + extra + 1
        limits.spend(_ITEM_COST)
        if size > limits.max_size:
            limits.make(size)
        yield item


def call_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a built-in type."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        if not (len(owner) <= SMALL and name in _CHEAP and _are_small(args)):
            args = _check_text(owner, name, args, kwargs)
    elif type(owner) is dict and name in _OF_MAPPINGS:
        if args and type(args[0]) is tuple:
            budget().spend(budget().measure(args[0]))
    elif isinstance(owner, list | tuple | dict):
        budget().spend(budget().measure(owner))
    else:
        check_unknown((owner if not isinstance(owner, int) else str(owner), *args), kwargs)
    made = method(*args, **kwargs)
    if isinstance(made, str | bytes):
        if len(made) > SMALL:
            budget().make(len(made))
    elif isinstance(made, dict):
        budget().measure(made)
    return made


def _check_text(
    owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    limits, size = budget(), len(owner)
    first = args[0] if args else None
    if name in _LINEAR:
        limits.spend(size)
    elif name in _PRODUCT:
        check_product(owner, first)
    elif name in _PADDING and isinstance(first, int):
        limits.make(max(size, first))
    elif name == "expandtabs":
        width = first if isinstance(first, int) else kwargs.get("tabsize", 8)
        limits.make(size + owner.count("\t") * width if isinstance(width, int) else size)
    elif name == "replace" and len(args) > 1:
        check_replacement(owner, first, args[1])
    elif name == "join" and args:
        args = (check_join(owner, first),)
    elif name == "translate" and isinstance(first, Mapping):
        limits.make(size * max(map(limits.measure, first.values()), default=1))
    elif name == "encode" and (first is None or _CODECS.fullmatch(str(first))):
        limits.make(size * _ENCODED)
    elif name in ("format", "format_map"):
        check_format(owner, args, kwargs)
    else:
        check_unknown((owner, *args), kwargs)
    return args


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        budget().make(len(left) * _factor(right) + len(right) * _factor(left))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        sizes = budget().extent(left), budget().extent(right)
        made = operator.add(left, right)
        budget().remember(made, sizes[0][0] + sizes[1][0], max(sizes[0][1], sizes[1][1]))
        return made
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    else:
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(sequence, str | bytes | list | tuple):
            budget().make(budget().measure(sequence) * max(times, 0))
    return left * right


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")


def _written(value: Any) -> int:
    # A float may be written out in full.
    return 320 if isinstance(value, float) else budget().measure(value)


def _widest(value: Any) -> int:
    """The largest width or precision that the value, as part of a format, may request."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str):
        return max(map(_number, _DIGITS.findall(value)), default=0)
    # A format may also access its attributes and items.
    return 10**10 if isinstance(value, Mapping | list | tuple) else 0


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**10


def _factor(*texts: Any) -> int:
    return _ESCAPED if any(isinstance(text, Markup) for text in texts) else 1


def _are_small(args: tuple[Any, ...]) -> bool:
    return not args or not isinstance(args[0], str | tuple) or len(args[0]) <= SMALL
