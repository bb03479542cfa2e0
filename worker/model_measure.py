"""What one token and one request cost a model in cache, read from shapes alone."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.model_shape import ModelShape

# Models that name no limit (pure state models) have none; this one only keeps numbers finite.
_UNLIMITED_CONTEXT = 1 << 20
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

# MLX ships no types for its modules, and mlx-lm's caches share no base that a plan could use.
Model: TypeAlias = Any
CacheEntry: TypeAlias = Any


def measure_shape(model: Model, config: dict[str, Any]) -> ModelShape:
    """Measure a model whose weights may still be lazy; nothing is evaluated.

    One token runs through the graph without being computed: the shapes that it leaves in the
    caches are exact for every architecture, latent attention and hybrids included.
    """
    cache = make_prompt_cache(model)
    logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
    layers = [_flattened(entry) for entry in cache]
    kv_bytes = [[_kv_bytes_per_token(part) for part in parts] for parts in layers]
    state_bytes = [[_state_bytes(part) for part in parts] for parts in layers]
    named: Any = tree_flatten(model.parameters())
    return ModelShape(
        num_layers=len(model.layers),
        attention_layers=sum(any(layer) for layer in kv_bytes),
        auxiliary_layers=sum(any(layer) for layer in state_bytes),
        kv_bytes_per_token=sum(map(sum, kv_bytes)),
        auxiliary_bytes_per_slot=sum(map(sum, state_bytes)),
        vocab_size=int(logits.shape[-1]),
        context_length=_context_length(config),
        weights_nbytes=sum(int(array.nbytes) for _, array in named),
    )


def _flattened(entry: CacheEntry) -> list[CacheEntry]:
    if isinstance(entry, CacheList):
        return [part for inner in entry.caches for part in _flattened(inner)]
    return [entry]


def _kv_bytes_per_token(entry: CacheEntry) -> int:
    """Bytes of keys and values per position; 0 for a state entry or one that nothing wrote."""
    if isinstance(entry, ArraysCache):
        return 0
    if not hasattr(entry, "keys") or not hasattr(entry, "values"):
        raise ConfigError(
            f"cannot plan for this model: its cache {type(entry).__name__} is of an unknown kind"
        )
    parts = [part for part in (entry.keys, entry.values) if part is not None]
    return sum(int(part.nbytes) // int(part.shape[-2]) for part in parts)


def _state_bytes(entry: CacheEntry) -> int:
    if not isinstance(entry, ArraysCache):
        return 0
    states: Sequence[mx.array | None] = entry.cache
    return sum(int(state.nbytes) for state in states if state is not None)


def _context_length(config: dict[str, Any]) -> int:
    for level in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(level.get(key), int):
                return int(level[key])
    return _UNLIMITED_CONTEXT
