"""A device that holds a step's inputs until the next step is launched, as Metal may.

While a buffer has another reference, MLX copies it instead of writing in place.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from mlx_dp.kvcache.batch.batched_kv_cache import BatchedKVCache


@contextmanager
def inputs_held() -> Iterator[None]:
    """Hold the inputs of each layer's attention until its attention in the next step has ended."""
    end_step = BatchedKVCache.end_step
    held: WeakKeyDictionary[BatchedKVCache, deque[Any]] = WeakKeyDictionary()

    def hold(cache: BatchedKVCache) -> Any:
        held.setdefault(cache, deque(maxlen=2)).append(cache._parts)
        return end_step(cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchedKVCache, "end_step", hold)
        yield
