"""The caches of one forward pass over short chunks of several prompts."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_dp.kvcache.batch.batched_kv_cache import BatchedKVCache
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.batch.padded_step import PaddedStep
from mlx_dp.kvcache.kinds import Store
from mlx_dp.kvcache.layout import CacheLayout


class PaddedPass:
    """``caches`` for one call of the model on tokens [chunks, longest], padded on the right.

    For models with recurrent states, in which a token cannot be a row of its own. The model must
    keep the padding out of its states, by means of their lengths and mask. Not all models do: only
    a model that passed the padding check at load may run this way.
    """

    def __init__(self, layout: CacheLayout, chunks: Sequence[MixedChunk]) -> None:
        self._chunks = tuple(chunks)
        step = PaddedStep(chunks)
        self.width = step.width
        offset = mx.array([chunk.position for chunk in chunks], dtype=mx.int32)
        self._kv: list[BatchedKVCache] = []
        self._states: dict[int, ArraysCache] = {}
        leaves: list[Any] = []
        for index, leaf in enumerate(layout.leaves):
            if leaf.store is Store.STATE:
                self._states[index] = self._joined(index)
                leaves.append(self._states[index])
                continue
            cache = BatchedKVCache(index, window=leaf.window, grouped_mask=False)
            cache.begin_step(step, offset)
            self._kv.append(cache)
            leaves.append(cache)
        self.caches: list[Any] = layout.nest(leaves)

    def end(self) -> list[mx.array]:
        """Give every prompt views of its states. The next pass replaces the states, so copy a view
        before keeping it.

        Returns arrays to evaluate, as ``KVBatch.end_step`` does.
        """
        for index, state in self._states.items():
            for row, chunk in enumerate(self._chunks):
                chunk.caches[index].cache = [
                    None if array is None else array[row : row + 1] for array in state.cache
                ]
        return [array for cache in self._kv for array in cache.end_step()]

    def _joined(self, index: int) -> ArraysCache:
        """Join all prompts' states of one leaf; a prompt without a state gets zeros."""
        rows = [chunk.caches[index].cache for chunk in self._chunks]
        joined: Any = ArraysCache(len(rows[0]))
        joined.cache = [_stacked(arrays) for arrays in zip(*rows, strict=True)]
        sizes = [chunk.num_tokens for chunk in self._chunks]
        if min(sizes) < max(sizes):
            # One array per leaf, since the model counts it down in place.
            joined.lengths = mx.array(sizes, dtype=mx.int32)
        state: ArraysCache = joined
        return state


def _stacked(arrays: Sequence[mx.array | None]) -> mx.array | None:
    like = next((array for array in arrays if array is not None), None)
    if like is None:
        return None
    return mx.concatenate([mx.zeros_like(like) if a is None else a for a in arrays])
