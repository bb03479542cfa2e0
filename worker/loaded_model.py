"""A model in memory, and what its caches look like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_dp.kvcache import attention
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import CacheLayout, inspect_caches
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.model_shape import ModelShape
from mlx_dp.worker.engine import UnsupportedModelError
from mlx_dp.worker.model_measure import measure_shape
from mlx_dp.worker.weight_files import check_weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """``empty`` has one row without content per cache: its heads, widths and dtype."""

    model: Any
    shape: ModelShape
    empty: tuple[LayerKV, ...]


def load(path: Path) -> LoadedModel:
    """Load an mlx-lm model directory and evaluate its weights.

    Raises ConfigError for a directory that holds no whole model, UnsupportedModelError for an
    architecture that mlx-lm does not have or that cannot be batched yet.
    """
    check_weight_files(path)
    attention.install()
    try:
        model, config = load_model(path, lazy=True)
    except FileNotFoundError as error:
        raise ConfigError(f"--model {path}: {error}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"--model {path}: {error}") from error
    caches = make_prompt_cache(model)
    _refuse_unserved(inspect_caches(caches))
    shape = measure_shape(model, config)
    empty = _empty_rows(model, caches)
    mx.eval(model.parameters())
    return LoadedModel(model=model, shape=shape, empty=empty)


def _refuse_unserved(layout: CacheLayout) -> None:
    if layout.hybrid:
        raise UnsupportedModelError(
            "this model has recurrent layers (linear attention), which this version of mlx-dp "
            "does not serve yet"
        )
    if layout.other:
        raise UnsupportedModelError(
            f"this model keeps {' and '.join(layout.other_kinds)} caches, which this version of "
            "mlx-dp does not serve yet: only models with plain KV caches"
        )


def _empty_rows(model: Any, caches: list[Any]) -> tuple[LayerKV, ...]:
    """Learn each cache's shape from one token whose graph is never computed."""
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    unwritten = [index for index, cache in enumerate(caches) if cache.keys is None]
    if unwritten:
        raise UnsupportedModelError(f"the model never writes its caches {unwritten}")
    return tuple(LayerKV(_empty(cache.keys), _empty(cache.values)) for cache in caches)


def _empty(buffer: mx.array) -> mx.array:
    return mx.zeros((1, buffer.shape[1], 0, buffer.shape[3]), dtype=buffer.dtype)
