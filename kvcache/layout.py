"""Which of a model's caches hold attention KV and which hold auxiliary state.

The layout comes from the caches that the model itself makes, never from its name. The number of
caches can differ from the number of layers, so indices here count caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_lm.models.cache import CacheList

from mlx_dp.kvcache.kinds import CacheKind, Store, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLeaf:
    """One cache, or one member of a cache list. ``window``: the tokens that a window keeps."""

    kind: CacheKind
    name: str
    window: int | None = None

    @property
    def store(self) -> Store:
        return self.kind.store


@dataclass(frozen=True)
class CacheLayout:
    """The structure of a model's caches: for every cache, its leaves in order.

    A cache list has several leaves; numbers of leaves count each of them.
    """

    entries: tuple[tuple[CacheLeaf, ...], ...]
    lists: tuple[bool, ...]
    """Which entries are cache lists, even of one leaf."""

    @cached_property
    def leaves(self) -> tuple[CacheLeaf, ...]:
        return tuple(leaf for entry in self.entries for leaf in entry)

    @cached_property
    def attention(self) -> tuple[int, ...]:
        """The caches that hold only attention KV, windows included."""
        return self._entries_of(Store.TOKENS, Store.WINDOW)

    @cached_property
    def auxiliary(self) -> tuple[int, ...]:
        """The caches that hold only recurrent state."""
        return self._entries_of(Store.STATE)

    @cached_property
    def mixed(self) -> tuple[int, ...]:
        """The cache lists that hold a recurrent state beside KV."""
        return tuple(
            index
            for index, entry in enumerate(self.entries)
            if Store.NONE not in {leaf.store for leaf in entry}
            and index not in self.attention
            and index not in self.auxiliary
        )

    @cached_property
    def other_kinds(self) -> tuple[str, ...]:
        """Names of the caches that only their own model understands."""
        names = (leaf.name for leaf in self.leaves if leaf.store is Store.NONE)
        return tuple(dict.fromkeys(names))

    @property
    def unbatchable(self) -> str | None:
        """Why no batch can hold these caches; None: a batch can."""
        kinds = " and ".join(self.other_kinds)
        return f"no batch can hold {kinds} caches" if kinds else None

    @property
    def hybrid(self) -> bool:
        return any(leaf.store is Store.STATE for leaf in self.leaves)

    @property
    def stateful(self) -> bool:
        """A prefix can be continued only where a snapshot was taken."""
        return any(leaf.store in (Store.STATE, Store.WINDOW) for leaf in self.leaves)

    @property
    def trims_to(self) -> int:
        """The longest snapshot, in tokens, that can be cut back to fewer tokens."""
        if self.hybrid:
            return 0
        return min((leaf.window for leaf in self.leaves if leaf.window is not None), default=0)

    @cached_property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The window of every leaf with KV; None: the leaf keeps every token."""
        stores = (Store.TOKENS, Store.WINDOW)
        return tuple(leaf.window for leaf in self.leaves if leaf.store in stores)

    def describe(self) -> str:
        """Describe the model's caches for people."""
        counts: dict[str, int] = {}
        for leaf in self.leaves:
            name = leaf.kind.name if leaf.window is None else f"{leaf.kind.name} {leaf.window}"
            name = leaf.name if leaf.store is Store.NONE else name
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    def flatten(self, caches: Sequence[Any]) -> list[Any]:
        """Return a list of caches with this layout leaf by leaf."""
        flat: list[Any] = []
        for cache, is_list in zip(caches, self.lists, strict=True):
            flat += cache.caches if is_list else [cache]
        return flat

    def nest(self, leaves: Sequence[Any]) -> list[Any]:
        """Return leaves as the list of caches that the model expects."""
        caches: list[Any] = []
        remaining = iter(leaves)
        for entry, is_list in zip(self.entries, self.lists, strict=True):
            own = [next(remaining) for _ in entry]
            caches.append(CacheList(*own) if is_list else own[0])  # type: ignore[no-untyped-call]
        return caches

    def _entries_of(self, *stores: Store) -> tuple[int, ...]:
        return tuple(
            index
            for index, entry in enumerate(self.entries)
            if all(leaf.store in stores for leaf in entry)
        )


def inspect_caches(caches: Sequence[Any]) -> CacheLayout:
    """Return the layout of a model's caches."""
    entries = tuple(
        tuple(_leaf(member) for member in cache.caches)
        if isinstance(cache, CacheList)
        else (_leaf(cache),)
        for cache in caches
    )
    return CacheLayout(entries, tuple(isinstance(cache, CacheList) for cache in caches))


def _leaf(cache: Any) -> CacheLeaf:
    kind = kind_of(cache)
    return CacheLeaf(kind=kind, name=type(cache).__name__, window=kind.window(cache))
