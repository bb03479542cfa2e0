"""The kinds of mlx-lm caches, one strategy each.

A new kind is a class here and a row of ``KINDS``. It names the store of a batch that holds its
content, and converts between mlx-lm's own cache and that store. No other module reads the fields of
mlx-lm's caches.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_dp.kvcache.kv_row import LayerKV

LeafArrays = tuple[mx.array, ...]
"""One leaf's content of one request, [1, ...] each: keys and values, or a state's arrays."""


class Store(Enum):
    """The place of a leaf's content outside mlx-lm's own cache."""

    TOKENS = auto()
    """Every token's KV: in slabs, and in segments of the prefix cache."""
    WINDOW = auto()
    """The KV of the last tokens: as a ring in slabs, and in snapshots."""
    STATE = auto()
    """Arrays of a fixed size: in state rows, and in snapshots."""
    NONE = auto()
    """No place: only the model understands its cache, so requests run unbatched."""


class CacheKind(ABC):
    """Reads, fills and measures the mlx-lm caches of one kind, of one request each."""

    name: str
    store: Store

    @abstractmethod
    def matches(self, cache: Any) -> bool:
        """Tell whether a model's cache is of this kind."""

    def window(self, cache: Any) -> int | None:
        """Return the number of tokens that the cache keeps; None: the kind has no window."""
        return None

    @abstractmethod
    def read(self, cache: Any, length: int) -> LeafArrays | None:
        """Return the content after ``length`` tokens, as views; None: a part is not written yet."""

    @abstractmethod
    def fill(
        self, cache: Any, content: LeafArrays, *, length: int, room: int, surplus: int
    ) -> None:
        """Put content of ``length`` tokens into an empty cache, with ``room`` for more.

        The content of a window or state covers ``surplus`` tokens beyond ``length``.
        """

    @abstractmethod
    def empty(self, cache: Any) -> LeafArrays | None:
        """Return content of 0 tokens, in the shapes of a written cache; None: this cache was never
        written.
        """

    @abstractmethod
    def nbytes(self, cache: Any) -> int:
        """Return the bytes of one token; of a state, all bytes."""

    @abstractmethod
    def repeat(self, cache: Any, rows: int) -> None:
        """Replace the cache's one row by several equal rows."""

    def make_room(self, cache: Any, room: int) -> None:  # noqa: B027 - most kinds do not grow
        """Make a growing cache allocate ``room`` tokens at its first write."""

    def growth_nbytes(self, cache: Any) -> int:
        """Return the bytes that the next token adds to what the cache has allocated."""
        return 0


class _KVKind(CacheKind):
    """Keys and values by token, [1, KV heads, tokens, head dim]."""

    def empty(self, cache: Any) -> LeafArrays | None:
        if cache.keys is None or cache.values is None:
            return None
        kept = LayerKV(cache.keys, cache.values)
        return LayerKV(*(mx.zeros((*a.shape[:2], 0, a.shape[3]), dtype=a.dtype) for a in kept))

    def nbytes(self, cache: Any) -> int:
        return _bytes_per_token(cache)

    def repeat(self, cache: Any, rows: int) -> None:
        cache.keys = mx.repeat(cache.keys, rows, axis=0)
        cache.values = mx.repeat(cache.values, rows, axis=0)


class GrowingKV(_KVKind):
    """KV of every token."""

    name = "KV"
    store = Store.TOKENS

    def matches(self, cache: Any) -> bool:
        return type(cache) is KVCache

    def read(self, cache: Any, length: int) -> LeafArrays | None:
        return LayerKV(cache.keys, cache.values).tokens(0, length)

    def fill(
        self, cache: Any, content: LeafArrays, *, length: int, room: int, surplus: int
    ) -> None:
        keys, values = content
        assert keys.shape[2] == length, (keys.shape, length)
        cache.keys, cache.values = _padded(keys, room), _padded(values, room)
        cache.offset = length

    def make_room(self, cache: Any, room: int) -> None:
        # With the default step it copies all its tokens every 256 tokens.
        cache.step = room

    def growth_nbytes(self, cache: Any) -> int:
        if not cache.offset or cache.offset != cache.keys.shape[2]:
            return 0
        return LayerKV(cache.keys, cache.values).nbytes // int(cache.offset) * int(cache.step)


class WindowKV(_KVKind):
    """KV of the last tokens, in chronological order."""

    name = "window"
    store = Store.WINDOW

    def matches(self, cache: Any) -> bool:
        return type(cache) is RotatingKVCache and not cache.keep

    def window(self, cache: Any) -> int | None:
        return int(cache.max_size)

    def read(self, cache: Any, length: int) -> LeafArrays | None:
        assert cache.offset == length, (cache.offset, length)
        ordered = LayerKV(cache._temporal_order(cache.keys), cache._temporal_order(cache.values))
        have = ordered.keys.shape[2]
        return ordered.tokens(have - min(length, cache.max_size), have)

    def fill(
        self, cache: Any, content: LeafArrays, *, length: int, room: int, surplus: int
    ) -> None:
        kept = content[0].shape[2] - surplus
        assert kept == min(length, cache.max_size), (kept, length, surplus, cache.max_size)
        first = LayerKV(*content).tokens(0, kept)
        cache.keys, cache.values = (mx.contiguous(array) for array in first)
        cache.offset = length
        cache._idx = kept


class RecurrentState(CacheKind):
    """A few arrays of a fixed size. Every token replaces them."""

    name = "state"
    store = Store.STATE

    def matches(self, cache: Any) -> bool:
        return isinstance(cache, ArraysCache)

    def read(self, cache: Any, length: int) -> LeafArrays | None:
        return None if any(array is None for array in cache.cache) else tuple(cache.cache)

    def fill(
        self, cache: Any, content: LeafArrays, *, length: int, room: int, surplus: int
    ) -> None:
        assert not surplus, (
            f"a state after {length + surplus} tokens cannot be cut back to {length}"
        )
        # A copy: the model may change a state in place.
        cache.cache = [mx.array(array) for array in content]

    def empty(self, cache: Any) -> LeafArrays | None:
        """A state has a fixed size: its shapes are those of any that was written."""
        return self.read(cache, 0)

    def nbytes(self, cache: Any) -> int:
        return sum(int(array.nbytes) for array in arrays_in(cache.state))

    def repeat(self, cache: Any, rows: int) -> None:
        cache.cache = [mx.repeat(array, rows, axis=0) for array in cache.cache]


class Unknown(CacheKind):
    """A cache that only its own model understands. It is measured and never read."""

    name = "other"
    store = Store.NONE

    def matches(self, cache: Any) -> bool:
        return True

    def read(self, cache: Any, length: int) -> LeafArrays | None:
        raise AssertionError(f"the content of {type(cache).__name__} is not known")

    def fill(
        self, cache: Any, content: LeafArrays, *, length: int, room: int, surplus: int
    ) -> None:
        raise AssertionError(f"the content of {type(cache).__name__} is not known")

    def empty(self, cache: Any) -> LeafArrays | None:
        return None

    def nbytes(self, cache: Any) -> int:
        return _bytes_per_token(cache)

    def repeat(self, cache: Any, rows: int) -> None:
        raise AssertionError(f"the content of {type(cache).__name__} is not known")


KINDS: Sequence[CacheKind] = (GrowingKV(), WindowKV(), RecurrentState())
UNKNOWN: Final = Unknown()


def kind_of(cache: Any) -> CacheKind:
    """Return the first kind in ``KINDS`` that matches a model's cache."""
    return next((kind for kind in KINDS if kind.matches(cache)), UNKNOWN)


def arrays_in(state: Any) -> list[mx.array]:
    """Return the arrays in nested containers; other values are skipped."""
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, dict):
        return arrays_in(list(state.values()))
    if isinstance(state, list | tuple):
        return [array for inner in state for array in arrays_in(inner)]
    return []


def _bytes_per_token(cache: Any) -> int:
    """Bytes that a cache keeps per position; 0 for a cache that was never written."""
    arrays = [array for array in arrays_in(cache.state) if array.ndim > 1]
    return sum(int(array.nbytes) // int(array.shape[-2]) for array in arrays)


def _padded(array: mx.array, room: int) -> mx.array:
    rows, heads, tokens, dim = array.shape
    if tokens >= room:
        return array
    pad = mx.zeros((rows, heads, room - tokens, dim), dtype=array.dtype)
    return mx.concatenate([array, pad], axis=2)
