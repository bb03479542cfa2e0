"""Measures a model's cache per token and per request from shapes alone."""

from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.kinds import Store
from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.proto.capacity.model_shape import CacheWindow, ModelShape

# Models that name no limit (pure state models) have none; this keeps numbers finite.
_UNLIMITED_CONTEXT = 1 << 20
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

# MLX ships no types for its modules, and mlx-lm's caches share no base that a plan could use.
Model: TypeAlias = Any


def measure_shape(model: Model, config: dict[str, Any]) -> ModelShape:
    """Measure a model whose weights may still be lazy; nothing is evaluated.

    One token runs through the graph without being computed: the shapes that it leaves in the
    caches are exact for every architecture, latent attention and hybrids included.
    """
    caches = make_prompt_cache(model)
    layout = inspect_caches(caches)
    logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    grown = 0
    windows: dict[int, int] = {}
    state = 0
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        nbytes = leaf.kind.nbytes(cache)
        match leaf.store:
            case Store.TOKENS | Store.NONE:
                grown += nbytes
            case Store.WINDOW:
                assert leaf.window is not None, "a window has a width"
                windows[leaf.window] = windows.get(leaf.window, 0) + nbytes
            case Store.STATE:
                state += nbytes
    return ModelShape(
        num_layers=len(model.layers),
        attention_layers=len(layout.entries) - len(layout.auxiliary),
        auxiliary_layers=len(layout.auxiliary) + len(layout.mixed),
        kv_bytes_per_token=grown,
        auxiliary_bytes_per_slot=state,
        windows=tuple(
            CacheWindow(tokens=tokens, bytes_per_token=nbytes)
            for tokens, nbytes in sorted(windows.items())
        ),
        vocab_size=int(logits.shape[-1]),
        context_length=_context_length(config),
        weights_nbytes=weights_nbytes(model),
    )


def weights_nbytes(module: Model) -> int:
    """Return the bytes of all weights of a module, evaluated or not."""
    named: Any = tree_flatten(module.parameters())
    return sum(int(array.nbytes) for _, array in named)


def _context_length(config: dict[str, Any]) -> int:
    for level in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            # In some files 0 and -1 mean that there is no limit.
            if isinstance(level.get(key), int) and level[key] >= 1:
                return int(level[key])
    return _UNLIMITED_CONTEXT
