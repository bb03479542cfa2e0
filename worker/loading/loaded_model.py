"""A model in memory, and the layout of its caches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_dp.kvcache.batch import attention
from mlx_dp.kvcache.kinds import LeafArrays, Store
from mlx_dp.kvcache.layout import CacheLayout, inspect_caches
from mlx_dp.kvcache.row_content import RowContent, row_content
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.loading.model_measure import measure_shape
from mlx_dp.worker.loading.weight_files import check_weight_files

_PROBE_TOKENS: Final = 32
"""Longer than any convolution's history, so that states have their final shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The structure of a batch's rows. ``empty`` is a row without content.

    ``state_shapes`` are the final shapes of every state's arrays, [1, ...].
    """

    empty: RowContent
    state_shapes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def state_sizes(self) -> list[int]:
        return [len(state) for state in self.state_shapes]

    def accepts(self, content: RowContent | None) -> bool:
        """Whether a row can join the batch: all its states exist in their final shapes."""
        if content is None:
            return False
        shapes = tuple(tuple(a.shape for a in state) for state in content.recent.states)
        return shapes == self.state_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """``batch`` None: only the model itself understands its caches."""

    model: Any
    shape: ModelShape
    layout: CacheLayout
    batch: BatchLayout | None


def load(path: Path, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load an mlx-lm model directory and evaluate its weights. Raises the errors of ``read``."""
    loaded = read(path, trust_remote_code=trust_remote_code)
    mx.eval(loaded.model.parameters())
    return loaded


def read(path: Path, *, trust_remote_code: bool = False) -> LoadedModel:
    """Read a model directory. The weights stay lazy.

    ``trust_remote_code``: the directory may bring code of its own, which is run.
    Raises ConfigError for a directory that holds no whole model, UnsupportedModelError for an
    architecture that mlx-lm does not have.
    """
    check_weight_files(path)
    attention.install()
    try:
        model, config = load_model(path, lazy=True, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        raise ConfigError(f"--model {path}: {error}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"--model {path}: {error}") from error
    except SystemExit as error:
        # Some model files exit when a package that they need is missing.
        raise UnsupportedModelError(
            f"--model {path}: its architecture cannot be imported"
        ) from error
    return inspect(model, config)


def inspect(model: Any, config: dict[str, Any]) -> LoadedModel:
    """Inspect a model's caches. Its weights may be lazy."""
    layout = inspect_caches(make_prompt_cache(model))
    return LoadedModel(
        model=model,
        shape=measure_shape(model, config),
        layout=layout,
        batch=None if layout.other_kinds else _batch_layout(model, layout),
    )


def _batch_layout(model: Any, layout: CacheLayout) -> BatchLayout | None:
    """Find the shapes from the graph of a few tokens, which is never computed."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE_TOKENS), dtype=mx.int32), cache=caches)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    empty: dict[Store, list[LeafArrays]] = {store: [] for store in Store}
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        content = leaf.kind.empty(cache)
        if content is None:
            # A cache that is not written by every pass.
            return None
        empty[leaf.store].append(content)
    shapes = tuple(tuple(array.shape for array in state) for state in empty[Store.STATE])
    return BatchLayout(empty=row_content(0, {**empty, Store.STATE: ()}), state_shapes=shapes)
