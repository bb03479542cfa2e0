"""Which of a model's caches hold attention KV and which hold auxiliary state.

Found by inspecting the caches that the model itself makes, never by its name. The number of
caches can differ from the number of layers, so indices here count caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Indices into the list of caches, each in exactly one of the four groups.

    ``attention``: KV that grows with every token. ``auxiliary``: recurrent state of fixed size.
    ``mixed``: a cache list that holds an auxiliary state beside KV. ``other``: every other kind,
    named in ``other_kinds`` (sliding windows, chunks).
    """

    attention: tuple[int, ...]
    auxiliary: tuple[int, ...]
    mixed: tuple[int, ...]
    other: tuple[int, ...]
    other_kinds: tuple[str, ...]

    @property
    def hybrid(self) -> bool:
        return bool(self.auxiliary or self.mixed)

    def pool_index(self, cache: int) -> int:
        """Place of an attention cache among the attention caches."""
        return self.attention.index(cache)


def inspect_caches(caches: Sequence[Any]) -> CacheLayout:
    """Sort a model's caches by kind."""
    groups: dict[str, list[int]] = {"attention": [], "auxiliary": [], "mixed": [], "other": []}
    kinds: dict[str, None] = {}
    for index, cache in enumerate(caches):
        group = _group(cache)
        groups[group].append(index)
        if group == "other":
            kinds[type(cache).__name__] = None
    return CacheLayout(
        attention=tuple(groups["attention"]),
        auxiliary=tuple(groups["auxiliary"]),
        mixed=tuple(groups["mixed"]),
        other=tuple(groups["other"]),
        other_kinds=tuple(kinds),
    )


def _group(cache: Any) -> str:
    if type(cache) is KVCache:
        return "attention"
    if isinstance(cache, ArraysCache):
        return "auxiliary"
    if isinstance(cache, CacheList) and any(isinstance(c, ArraysCache) for c in cache.caches):
        return "mixed"
    return "other"
