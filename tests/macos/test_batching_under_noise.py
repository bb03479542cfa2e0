"""Models still batch on devices that round products of several rows differently.

Errors in a batch are still found and reported.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import mlx.nn as nn

from mlx_dp.kvcache.batch import attention
from mlx_dp.kvcache.batch.batched_kv_cache import BatchedKVCache
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.loading.batch_check import ALONE, choose_form
from mlx_dp.worker.loading.loaded_model import LoadedModel, inspect
from mlx_dp.worker.loading.padding_check import keeps_padding_out
from mlx_dp.worker.loading.rounding import FLOAT32_TOLERANCE
from mlx_dp.worker.loading.row_noise import decode_noise
from mlx_dp.worker.shards.sharded_load import shard_model
from tests.support.batches.matmul_noise import ONE_ULP, TF32, TWO_ULPS, MatmulNoise, matmul_noise
from tests.support.models.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.mlx

PROMPT = [(17 + 7 * at) % 256 for at in range(33)]


def tiny(name: str, dtype: mx.Dtype = mx.float32) -> LoadedModel:
    attention.install()
    model = ARCHITECTURES[name].build()
    model.set_dtype(dtype)
    return inspect(model, ARCHITECTURES[name].config)


@pytest.mark.parametrize(
    ("name", "dtype", "noise"),
    [
        ("llama_tied", mx.float32, TF32),
        ("llama_tied", mx.bfloat16, TWO_ULPS),
        ("qwen3_moe", mx.float32, TF32),
        ("qwen3_moe", mx.bfloat16, TWO_ULPS),
        ("mixtral", mx.float32, TF32),
        ("gemma3_text", mx.float32, TF32),
    ],
)
def test_models_share_a_batch_where_rows_are_rounded_otherwise(name, dtype, noise):
    with matmul_noise(noise):
        form = choose_form(tiny(name, dtype))
    assert form.batching is Batching.SEVERAL_SLABS, form.reason


def test_models_with_states_share_padded_passes_as_well():
    with matmul_noise(TF32):
        form = choose_form(tiny("qwen3_next"))
    assert (form.batching, form.pads) == (Batching.SEVERAL_SLABS, True), form.reason


def test_the_noise_is_seen_where_one_row_and_equal_rows_are_compared():
    loaded = tiny("llama")
    assert decode_noise(loaded, PROMPT, [5, 16]) < 1e-5
    with matmul_noise(TF32):
        assert 1e-4 < decode_noise(loaded, PROMPT, [5, 16]) < FLOAT32_TOLERANCE.most


class Altered:
    """A model with modified logits."""

    def __init__(self, model: Any, change: Callable[[mx.array], mx.array]) -> None:
        self._model = model
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return self._change(self._model(tokens, cache=cache))


def mixed_up(patch: pytest.MonkeyPatch, loaded: LoadedModel) -> LoadedModel:
    """Each row gets the output of the row before it."""
    return replace(loaded, model=Altered(loaded.model, lambda logits: mx.roll(logits, 1, axis=0)))


def coupled(patch: pytest.MonkeyPatch, loaded: LoadedModel) -> LoadedModel:
    """Each row attends to some of the row before it."""
    altered = Altered(loaded.model, lambda logits: logits + 0.3 * mx.roll(logits, 1, axis=0))
    return replace(loaded, model=altered)


def unmasked(patch: pytest.MonkeyPatch, loaded: LoadedModel) -> LoadedModel:
    """Rows of several lengths attend to padding behind their own tokens."""
    module = "mlx_lm.models.llama.scaled_dot_product_attention"
    shared = __import__("mlx_lm.models.llama").models.llama.scaled_dot_product_attention

    def attend(*arguments: Any, mask: Any, **named: Any) -> mx.array:
        return shared(*arguments, mask=None if isinstance(mask, mx.array) else mask, **named)

    patch.setattr(module, attend)
    return loaded


def misplaced(patch: pytest.MonkeyPatch, loaded: LoadedModel) -> LoadedModel:
    """Rows with positions of their own are eight positions early."""
    rope = mx.fast.rope

    def forgetful(*arguments: Any, offset: Any, **named: Any) -> mx.array:
        several = isinstance(offset, mx.array) and offset.size > 1
        return rope(*arguments, offset=mx.maximum(offset - 8, 0) if several else offset, **named)

    patch.setattr(mx.fast, "rope", forgetful)
    return loaded


def exchanged(patch: pytest.MonkeyPatch, loaded: LoadedModel) -> LoadedModel:
    """New keys and values go into another row."""
    write = BatchedKVCache.update_and_fetch

    def shifted(cache: Any, keys: mx.array, values: mx.array) -> Any:
        return write(cache, mx.roll(keys, 1, axis=0), mx.roll(values, 1, axis=0))

    patch.setattr(BatchedKVCache, "update_and_fetch", shifted)
    return loaded


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


FAULTS = (mixed_up, coupled, misplaced, exchanged)


@pytest.mark.parametrize(
    ("fault", "dtype", "noise"),
    [
        *((fault, mx.float32, TF32) for fault in (*FAULTS, unmasked)),
        *((fault, mx.bfloat16, ONE_ULP) for fault in FAULTS),
    ],
)
def test_a_fault_is_found_under_the_noise(fault, dtype, noise: MatmulNoise, patch):
    loaded = fault(patch, tiny("llama", dtype))
    with matmul_noise(noise):
        form = choose_form(loaded)
    assert form == ALONE
    assert "gives other results in a batch than alone" in form.reason


@dataclass
class Leaky:
    """A model into whose states a little of the padding of wider passes leaks."""

    model: Any
    leak: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        last = self.leak * tokens[:, -1:].astype(mx.float32)
        for state in cache if len(tokens) > 1 else ():
            state.cache = [
                array + last.reshape(-1, *([1] * (array.ndim - 1))) for array in state.cache
            ]
        return logits


@pytest.mark.parametrize(("leak", "kept_out"), [(0.0, True), (1e-4, False)])
def test_padding_is_told_from_rounding_that_depends_on_other_rows(leak, kept_out, caplog):
    loaded = tiny("mamba2")
    noise = MatmulNoise(ulps=64.0)
    with matmul_noise(noise), caplog.at_level(logging.INFO):
        assert keeps_padding_out(replace(loaded, model=Leaky(loaded.model, leak))) == kept_out
    assert ("when its tokens are others" in caplog.text) == (not kept_out)


COARSE = MatmulNoise(tf32=True, ulps=2.0**12)
"""Beyond the least tolerance of a single block already."""


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_blocks_are_sums_of_their_shards_where_rows_are_rounded_otherwise(name):
    model = ARCHITECTURES[name].build()
    with matmul_noise(COARSE):
        blocks = shard_model(model, rank=0, size=2, runner=AloneRunner()).records
    assert len(blocks) == len(model.layers)


class AloneRunner:
    def run(self, block: Any, rows: mx.array, shard: Any) -> Any:
        return shard(rows)


class Residual(nn.Module):
    """An MLP with a little of its input added, which is not the sum of its shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(32, 64)
        self.down_proj = nn.Linear(64, 32)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.relu(self.up_proj(x))) + 0.01 * x


class Mixing(Residual):
    """An MLP in which each row adds to those behind it."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.relu(self.up_proj(mx.cumsum(x, axis=-2))))


@pytest.mark.parametrize(
    ("mlp", "failure"), [(Residual, "is not the sum of its shards"), (Mixing, "mixes its rows")]
)
def test_a_block_that_cannot_be_divided_is_found_under_the_noise(mlp, failure):
    model = ARCHITECTURES["llama"].build()
    model.layers[1].mlp = mlp()
    with matmul_noise(COARSE), pytest.raises(UnsupportedModelError, match=failure):
        shard_model(model, rank=0, size=2, runner=AloneRunner())
