"""The limits of one rendering: CPU time, work, and the size of each value.

All limits grow with the size of the input, so that no chat is refused for its length. A value's
size is the number of its characters and items when written out: a list that holds one string a
million times is as large as its output.
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
"""Up to this size, the cost of the surrounding nodes covers an operation."""
NODE_COST: Final = 16
"""The cost of one node of the template's syntax tree each time it runs."""
MAX_DEPTH: Final = 200
"""Nesting of values. Schemas of tools have dozens of levels; C code recurses without a check."""

_BASE_SIZE: Final = 4 * 2**20
_SIZE_PER_INPUT: Final = 8
# JSON in JSON doubles escapes, and templates write more than they read.
_BASE_WORK: Final = 2**26
# A macro that walks a schema runs some hundred nodes for each name in it.
_WORK_PER_INPUT: Final = 512
_MESSAGES_PER_LIMIT: Final = 1000
_SIZE_PER_LIMIT: Final = 2**20
_STRIDE: Final = 2**16
"""Work between two checks of the clock: well below 20 ms."""
_ATOMS: Final = frozenset({bool, float, NoneType})
_COLLECTIONS: Final = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateLimitError(Exception):
    """The template exceeds the limit of work, size or depth."""


class TemplateTimeoutError(Exception):
    """The template exceeds its CPU time."""


class Budget:
    """The remaining budget of one rendering, and the sizes of values measured so far.

    The sandbox is immutable: values never change while a template runs, so sizes are cached.
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
        """``limit_s``: per started thousand messages and per started mebibyte of the input.

        ``own``: identities of the template's own strings.
        """
        self._cpu_time = cpu_time
        self._now = now
        self._started_at: float | None = None
        self._look_again_at = 0.0
        self._sizes: dict[int, tuple[int, int, object]] = {}
        self._kept = 0
        # The input from clients was already limited.
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
        """Spend work. Raises when no work or time is left."""
        self._left -= cost
        if self._left < self._next_look:
            self._look()

    def make(self, size: int) -> None:
        """Spend a value of this size, before it is made. Raises when it is too large."""
        if size > self.max_size:
            raise TemplateLimitError(
                f"it makes a value of more than {self.max_size} characters and items"
            )
        if size > SMALL:
            self.spend(size)

    def measure(self, value: Any) -> int:
        """Return the value's size. Raises when the value is too large or too deep."""
        kind = type(value)
        if kind is str:
            return len(value)
        if kind in _ATOMS:
            return 1
        if kind is int:
            return _size_of_number(value)
        return self.extent(value)[0]

    def extent(self, value: Any) -> tuple[int, int]:
        """Return size and depth of a value."""
        known = self._sizes.get(id(value))
        return known[:2] if known is not None else self._walk(value, 0)

    def remember(self, value: object, size: int, depth: int) -> None:
        """Cache the extent of a new value, and the value itself, since ids are reused."""
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
        # Only nested values are cached, since most others are never measured again.
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
            # Read late, since it is a system call, and most renderings end before this.
            self._started_at = self._cpu_time()
            self._look_again_at = now + self._limit_s
        elif now >= self._look_again_at:
            # A thread never uses more CPU time than the clock shows, which is cheap to read.
            left_s = self._limit_s - (self._cpu_time() - self._started_at)
            if left_s <= 0.0:
                raise TemplateTimeoutError
            self._look_again_at = now + left_s
        self._next_look = max(self._left - _STRIDE, 0)


_current: Final[ContextVar[Budget]] = ContextVar("template_budget")
budget: Final = _current.get
"""Return the budget of the current rendering. Raises LookupError outside of one."""


@contextmanager
def limited_to(of_rendering: Budget) -> Iterator[None]:
    """Set the budget of renderings inside the block."""
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
    # About three bits per digit.
    return 1 + value.bit_length() // 3
