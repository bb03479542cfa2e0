"""The one patch to mlx-lm: the attention function that its model files share.

Rows of very different lengths cannot attend as one array without padding all of them to the
longest, which on long contexts costs more than the rest of a step. So for a
batched cache whose rows lie in several slabs, the patched function attends slab by slab. For any
other cache it calls mlx-lm's own function.
"""

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlx_dp.kvcache.batch.batched_kv_cache import BatchedKVCache
from mlx_dp.kvcache.kv_row import LayerKV

_NAME = "scaled_dot_product_attention"
_original: Any = base.scaled_dot_product_attention


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(cache, BatchedKVCache):
        if cache.split:
            return cache.attend(queries, LayerKV(keys, values), scale=scale, sinks=sinks)
        cache.attended()
    result: mx.array = _original(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


def install() -> None:
    """Replace the attention function in every module that refers to it. Idempotent.

    Call it before a model is loaded: model files import the function by name.
    """
    setattr(base, _NAME, _attention)
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _NAME, None) is _original:
            setattr(module, _NAME, _attention)
