"""Reads the content of one request's caches, and fills caches with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.kinds import LeafArrays, Store, arrays_in
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A request's windows and states after ``position`` tokens. Nothing is copied.

    ``windows`` hold the last tokens in chronological order, at most the window's width.
    """

    position: int
    windows: tuple[LayerKV, ...]
    states: tuple[LeafArrays, ...]

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

    ``kv`` has the leaves that keep every token; ``recent`` has the others. Nothing is copied.
    """

    length: int
    kv: tuple[LayerKV, ...]
    recent: Snapshot

    def saved_kv(self, start: int, end: int) -> list[LayerKV]:
        """Return views of some tokens, of the leaves that keep every token."""
        assert end <= self.length, (start, end, self.length)
        return [kv.tokens(start, end) for kv in self.kv]


def read_caches(layout: CacheLayout, caches: Sequence[Any], length: int) -> RowContent | None:
    """Read a model's own caches; None: a state is not complete yet."""
    found: dict[Store, list[LeafArrays]] = {store: [] for store in Store}
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        content = leaf.kind.read(cache, length)
        if content is None:
            return None
        found[leaf.store].append(content)
    return row_content(length, found)


def row_content(length: int, found: Mapping[Store, Sequence[LeafArrays]]) -> RowContent:
    """Sort the content of leaves by their stores."""
    kv = tuple(LayerKV(*leaf) for leaf in found[Store.TOKENS])
    windows = tuple(LayerKV(*leaf) for leaf in found[Store.WINDOW])
    return RowContent(length, kv, Snapshot(length, windows, tuple(found[Store.STATE])))


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

    A snapshot of more tokens is cut back: its windows must still hold all tokens that remain
    visible.
    """
    assert not layout.other_kinds, f"the content of {layout.other_kinds} is not known"
    assert (snapshot is not None) == layout.stateful, "states and windows need a snapshot"
    surplus = snapshot.position - length if snapshot is not None else 0
    contents: dict[Store, Iterator[LeafArrays]] = {
        Store.TOKENS: iter(kv),
        Store.WINDOW: iter(snapshot.windows if snapshot is not None else ()),
        Store.STATE: iter(snapshot.states if snapshot is not None else ()),
    }
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        content = next(contents[leaf.store])
        leaf.kind.fill(cache, content, length=length, room=room, surplus=surplus)


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """Return all arrays in a model's own caches. Unless they are evaluated, their graph grows."""
    return [array for cache in caches for array in arrays_in(cache.state)]


def make_room(layout: CacheLayout, caches: Sequence[Any], room: int) -> None:
    """Make growing caches allocate ``room`` tokens at once."""
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        leaf.kind.make_room(cache, room)


def growth_nbytes(layout: CacheLayout, caches: Sequence[Any]) -> int:
    """Bytes that the next token adds to the growing caches that are full."""
    return sum(
        leaf.kind.growth_nbytes(cache)
        for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True)
    )
