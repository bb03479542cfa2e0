"""What one rendering may take: CPU time, work, and the size of each value.

All bounds follow the size of the input, so that they never refuse a chat for being long. A value's
size is the number of its characters and items, counted as if it were written out: a list that holds
one string a million times is as large as its output.
"""

import sys
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from types import NoneType
from typing import Any, Final

from mlx_dp.orchestrator.text.template.origins import Origins

SMALL: Final = 1024
"""Up to this size an operation is covered by the cost of the nodes around it."""
NODE_COST: Final = 16
"""What one node of the template's syntax tree costs each time it runs."""
MAX_DEPTH: Final = 200
"""Lists in lists: schemas of tools have dozens. C code recurses through thousands, unchecked."""

_BASE_SIZE: Final = 4 * 2**20
_SIZE_PER_INPUT: Final = 8
# JSON in JSON doubles what it escapes, and templates write more than they read.
_BASE_WORK: Final = 2**26
# A macro that goes through a schema runs some hundred nodes for each name in it.
_WORK_PER_INPUT: Final = 512
_MESSAGES_PER_LIMIT: Final = 1000
_SIZE_PER_LIMIT: Final = 2**20
_STRIDE: Final = 2**16
"""Work between two looks at the clock: well below 20 ms."""
_ATOMS: Final = frozenset({bool, float, NoneType})
_COLLECTIONS: Final = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateLimitError(Exception):
    """The template wants more than a prompt can need."""


class TemplateTimeoutError(Exception):
    """The template takes more CPU time than it was given."""


class Budget:
    """What is left to one rendering, and the sizes of the values that it has measured.

    The sandbox is immutable: values never change while a template runs, so sizes are kept.
    """

    __slots__ = (
        "_cpu_time",
        "_kept",
        "_left",
        "_limit_s",
        "_look_again_at",
        "_next_look",
        "_now",
        "_sizes",
        "_started_at",
        "max_size",
        "origins",
    )

    def __init__(
        self,
        messages: Sequence[Mapping[str, object]],
        others: Mapping[str, object],
        *,
        limit_s: float,
        own: frozenset[int] = frozenset(),
        cpu_time: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_s`` is for each thousand messages and each mebibyte of the input begun.

        ``own`` are the identities of strings that are the template's.
        """
        self._cpu_time = cpu_time
        self._now = now
        self._started_at: float | None = None
        self._look_again_at = 0.0
        self._sizes: dict[int, tuple[int, int, object]] = {}
        self._kept = 0
        # What clients sent has its bounds already.
        self.max_size = self._left = sys.maxsize
        self._next_look = 0
        size = self._size_of_all(messages, others)
        self.max_size = _BASE_SIZE + _SIZE_PER_INPUT * size
        self.origins = Origins(own, self.max_size)
        self._left = _BASE_WORK + _WORK_PER_INPUT * size + len(messages) * self.max_size
        self._next_look = self._left
        units = 1 + len(messages) / _MESSAGES_PER_LIMIT + size / _SIZE_PER_LIMIT
        self._limit_s = limit_s * units
        if limit_s <= 0.0:
            raise TemplateTimeoutError

    def spend(self, cost: int) -> None:
        """Count work. Raises when there is none left, or no time."""
        self._left -= cost
        if self._left < self._next_look:
            self._look()

    def make(self, size: int) -> None:
        """Count a value of this size that is about to be made. Raises when it is too large."""
        if size > self.max_size:
            raise TemplateLimitError(
                f"it makes a value of more than {self.max_size} characters and items"
            )
        if size > SMALL:
            self.spend(size)

    def measure(self, value: Any) -> int:
        """Return the value's size. Raises when it is too large or too deep."""
        kind = type(value)
        if kind is str:
            return len(value)
        if kind in _ATOMS:
            return 1
        if kind is int:
            return _size_of_number(value)
        return self.extent(value)[0]

    def extent(self, value: Any) -> tuple[int, int]:
        """Return size and depth."""
        known = self._sizes.get(id(value))
        return known[:2] if known is not None else self._walk(value, 0)

    def remember(self, value: object, size: int, depth: int) -> None:
        """Keep the extent of a new value, and the value itself, since ids are used again."""
        self.make(size)
        if depth > MAX_DEPTH:
            raise TemplateLimitError(f"it nests values deeper than {MAX_DEPTH}")
        items = len(value)  # type: ignore[arg-type]
        self._kept += items
        if self._kept > self.max_size:
            self._sizes.clear()
            self._kept = items
        self._sizes[id(value)] = (size, depth, value)

    def _size_of_all(
        self, messages: Sequence[Mapping[str, object]], others: Mapping[str, object]
    ) -> int:
        # Most are never asked for again: only what is nested is remembered.
        size = 8 * len(messages)
        for message in messages:
            for value in message.values():
                size += len(value) if type(value) is str else self.measure(value)
        return size + sum(map(self.measure, others.values()))

    def _walk(self, value: Any, level: int) -> tuple[int, int]:
        children = _children(value)
        if children is None:
            return _size_of_one(value), 0
        if level > MAX_DEPTH:
            raise TemplateLimitError(f"it nests values deeper than {MAX_DEPTH}")
        size, depth = 1 + len(value), 0
        sizes = self._sizes
        for child in children:
            kind = type(child)
            if kind is str:
                size += len(child)
            elif kind is int:
                size += _size_of_number(child)
            elif kind not in _ATOMS:
                known = sizes.get(id(child)) or self._walk(child, level + 1)
                size += known[0]
                depth = max(depth, known[1])
        self.remember(value, size, depth + 1)
        return size, depth + 1

    def _look(self) -> None:
        if self._left < 0:
            raise TemplateLimitError("it does more work than a chat of this size can need")
        now = self._now()
        if self._started_at is None:
            # Most renderings end before this: reading the CPU time is a call into the kernel.
            self._started_at = self._cpu_time()
            self._look_again_at = now + self._limit_s
        elif now >= self._look_again_at:
            # A thread never uses more CPU time than passes on the clock, which is cheap to read.
            left_s = self._limit_s - (self._cpu_time() - self._started_at)
            if left_s <= 0.0:
                raise TemplateTimeoutError
            self._look_again_at = now + left_s
        self._next_look = max(self._left - _STRIDE, 0)


_current: Final[ContextVar[Budget]] = ContextVar("template_budget")
budget: Final = _current.get
"""The budget of the rendering that runs here. Raises LookupError where none does."""


@contextmanager
def limited_to(of_rendering: Budget) -> Iterator[None]:
    """Give this budget to what renders inside."""
    token = _current.set(of_rendering)
    try:
        yield
    finally:
        _current.reset(token)


def _children(value: Any) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return chain(value, value.values())
    if isinstance(value, _COLLECTIONS):
        return value
    if isinstance(value, Mapping):
        return chain(value, value.values())
    return None


def _size_of_one(value: Any) -> int:
    if isinstance(value, str | bytes | range):
        return len(value)
    return _size_of_number(value) if isinstance(value, int) else 1


def _size_of_number(value: int) -> int:
    # Three bits make a digit.
    return 1 + value.bit_length() // 3
