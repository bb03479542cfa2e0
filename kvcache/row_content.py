"""What the caches of one request hold, taken out of them and put back.

The one place that knows the insides of mlx-lm's own caches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_dp.kvcache.cached_prefix import Save
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import CacheLayout, LeafKind
from mlx_dp.kvcache.state_rows import StateArrays


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A request's windows and states after ``position`` tokens. Nothing is copied.

    ``windows`` hold the last tokens in their order in time, at most the window's width.
    """

    position: int
    windows: tuple[LayerKV, ...]
    states: tuple[StateArrays, ...]

    @property
    def nbytes(self) -> int:
        kept = sum(window.nbytes for window in self.windows)
        return kept + sum(array.nbytes for state in self.states for array in state)

    def arrays(self) -> list[mx.array]:
        kept = [array for window in self.windows for array in window]
        return kept + [array for state in self.states for array in state]


@dataclass(frozen=True, slots=True)
class RowContent:
    """One request's caches after ``length`` tokens, leaf by leaf, [1, ...] each.

    ``kv`` has the leaves that keep every token, the others are in ``recent``. Nothing is copied.
    """

    length: int
    kv: tuple[LayerKV, ...]
    recent: Snapshot

    def saved_kv(self, save: Save) -> list[LayerKV]:
        """Some tokens of the leaves that keep every token, as views."""
        assert save.end <= self.length, (save, self.length)
        return [kv.tokens(save.start, save.end) for kv in self.kv]


def read_caches(layout: CacheLayout, caches: Sequence[Any], length: int) -> RowContent | None:
    """Take out what a model's own caches hold; None: a state is not all there yet."""
    kv: list[LayerKV] = []
    windows: list[LayerKV] = []
    states: list[StateArrays] = []
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        match leaf.kind:
            case LeafKind.KV:
                kv.append(LayerKV(cache.keys, cache.values).tokens(0, length))
            case LeafKind.WINDOW:
                windows.append(_in_time(cache, length))
            case LeafKind.STATE:
                if any(array is None for array in cache.cache):
                    return None
                states.append(tuple(cache.cache))
            case LeafKind.OTHER:
                raise AssertionError(f"nobody knows what {leaf.name} holds")
    return RowContent(length, tuple(kv), Snapshot(length, tuple(windows), tuple(states)))


def fill_caches(
    layout: CacheLayout,
    caches: Sequence[Any],
    kv: Sequence[LayerKV],
    snapshot: Snapshot | None,
    *,
    length: int,
    room: int,
) -> None:
    """Put the first ``length`` tokens into a model's own empty caches, with ``room`` for more.

    A snapshot that covers more tokens is cut back: its windows must still hold the first one.
    """
    assert (snapshot is not None) == layout.stateful, "states and windows need a snapshot"
    grown = iter(kv)
    windows = iter(snapshot.windows if snapshot is not None else ())
    states = iter(snapshot.states if snapshot is not None else ())
    cut = snapshot.position - length if snapshot is not None else 0
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        match leaf.kind:
            case LeafKind.KV:
                _fill_kv(cache, next(grown), length, room)
            case LeafKind.WINDOW:
                _fill_window(cache, next(windows), length, cut)
            case LeafKind.STATE:
                assert not cut, f"a state after {length + cut} tokens is none after {length}"
                # The model replaces what it holds, but may also change it in place.
                cache.cache = [mx.array(array) for array in next(states)]
            case LeafKind.OTHER:
                raise AssertionError(f"nobody knows what {leaf.name} holds")


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """All arrays in a model's own caches: they must be evaluated, or the graph piles up."""
    return [array for cache in caches for array in _arrays_in(cache.state)]


def _arrays_in(state: Any) -> list[mx.array]:
    """Arrays in nested containers, whatever else lies beside them."""
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, dict):
        return _arrays_in(list(state.values()))
    if isinstance(state, list | tuple):
        return [array for inner in state for array in _arrays_in(inner)]
    return []


def make_room(layout: CacheLayout, caches: Sequence[Any], room: int) -> None:
    """Have growing caches allocate ``room`` tokens at once; else they copy every 256 tokens."""
    for cache in layout.flatten(caches):
        if type(cache) is KVCache:
            cache.step = room


def growth_nbytes(layout: CacheLayout, caches: Sequence[Any]) -> int:
    """Bytes that the next token adds to growing caches which have filled what they have."""
    return sum(
        LayerKV(cache.keys, cache.values).nbytes // cache.offset * cache.step
        for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True)
        if leaf.kind is LeafKind.KV and cache.offset and cache.offset == cache.keys.shape[2]
    )


def _fill_kv(cache: KVCache, kv: LayerKV, length: int, room: int) -> None:
    assert kv.keys.shape[2] == length, (kv.keys.shape, length)
    cache.keys, cache.values = (_padded(array, room) for array in kv)
    cache.offset = length


def _padded(array: mx.array, room: int) -> mx.array:
    rows, heads, tokens, dim = array.shape
    if tokens >= room:
        return array
    pad = mx.zeros((rows, heads, room - tokens, dim), dtype=array.dtype)
    return mx.concatenate([array, pad], axis=2)


def _fill_window(cache: RotatingKVCache, kv: LayerKV, length: int, cut: int) -> None:
    kept = kv.keys.shape[2] - cut
    assert kept == min(length, cache.max_size), (kept, length, cut, cache.max_size)
    cache.keys, cache.values = (mx.contiguous(array) for array in kv.tokens(0, kept))
    cache.offset = length
    cache._idx = kept


def _in_time(cache: RotatingKVCache, length: int) -> LayerKV:
    """The last tokens in their order in time, at most as many as the window keeps."""
    assert cache.offset == length, (cache.offset, length)
    order: Callable[[Any], mx.array] = cache._temporal_order
    ordered = LayerKV(order(cache.keys), order(cache.values))
    have = ordered.keys.shape[2]
    return ordered.tokens(have - min(length, cache.max_size), have)
