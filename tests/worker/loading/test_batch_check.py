"""A model's batch form is found by running one, and is reported with its reason."""

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.worker.loading.batch_check import ALONE, choose_form
from mlx_dp.worker.loading.loaded_model import LoadedModel, load
from tests.support.models.tiny_models import (
    ARCHITECTURES,
    DENSE,
    DYNAMIC_ROPE,
    TINY_MODELS,
    TinyModel,
)

pytestmark = pytest.mark.mlx

SPLIT = BatchForm(split=True)
ONE_SLAB = BatchForm(split=False)
NOT_SPLIT = {
    "deepseek_v3": (ONE_SLAB, "makes its own masks"),
    "stablelm": (ONE_SLAB, "changes keys after it cached them"),
    "gemma2": (BatchForm(split=False, grouped_mask=True), "makes its own masks"),
    # Its later layers attend to the keys of earlier ones without naming them.
    "gemma4_text": (ONE_SLAB, "gives other results"),
    "plamo2": (ONE_SLAB, "does not use the shared attention function"),
    # Its masks are wider than its windows, so that its answers depend on where chunks end.
    "plamo3": (BatchForm(split=False, resumes=False), "gives other results"),
}
PADS = ("qwen3_next", "falcon_h1", "gear")
WINDOWS_AND_STATES = (
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "plamo3",
    "qwen3_next",
    "plamo2",
    "falcon_h1",
    "baichuan_m1",
    "gear",
    "recurrent_gemma",
    "mamba",
    "rwkv7",
)


def loaded(tiny: TinyModel, directory: Path) -> LoadedModel:
    return load(tiny.write(directory))


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    return loaded(DENSE["llama"], tmp_path)


@pytest.mark.parametrize("name", [*TINY_MODELS, *WINDOWS_AND_STATES])
def test_every_tiny_model_gets_its_form(name, tmp_path, caplog):
    form, reason = NOT_SPLIT.get(name, (SPLIT, ""))
    with caplog.at_level(logging.INFO, "mlx_dp.worker.loading.batch_check"):
        assert choose_form(loaded(ARCHITECTURES[name], tmp_path)) == replace(
            form, pads=name in PADS
        )
    assert reason in caplog.text
    found = [one for one in caplog.records if one.name == "mlx_dp.worker.loading.batch_check"]
    assert bool(reason) == bool(found)


def test_dynamic_rope_is_served_one_row_at_a_time(tmp_path):
    form = choose_form(loaded(DYNAMIC_ROPE, tmp_path))
    assert form == ALONE
    assert "requests of different lengths (ValueError" in form.reason


@pytest.mark.parametrize(
    ("name", "kind"), [("llama4", "ChunkedKVCache"), ("deepseek_v41", "LayerCache")]
)
def test_caches_that_only_their_model_understands_are_run_one_by_one(name, kind, tmp_path):
    form = choose_form(loaded(ARCHITECTURES[name], tmp_path))
    assert form == ALONE
    assert form.reason == f"no batch can hold {kind} caches"


def attend_alone(
    queries: mx.array, keys: mx.array, values: mx.array, *, cache: Any, scale: float, mask: Any
) -> mx.array:
    """Attention by a model's own arithmetic, blind to the cache that it is given."""
    repeats = queries.shape[1] // keys.shape[1]
    scores = scale * queries @ mx.repeat(keys, repeats, axis=1).swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, -1e30)
    elif mask == "causal":
        tokens, visible = scores.shape[-2:]
        at = mx.arange(visible - tokens, visible)[:, None]
        scores = mx.where(mx.arange(visible) <= at, scores, -1e30)
    return mx.softmax(scores, axis=-1) @ mx.repeat(values, repeats, axis=1)


def test_a_model_that_bypasses_the_shared_function_is_served_in_one_slab(
    llama, caplog, monkeypatch
):
    monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", attend_alone)
    with caplog.at_level(logging.INFO):
        assert choose_form(llama) == ONE_SLAB
    assert "does not use the shared attention function" in caplog.text


@dataclass
class Altered:
    """A model with modified logits."""

    model: Any
    change: Callable[[mx.array], mx.array]

    @property
    def layers(self) -> Any:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return self.change(self.model(tokens, cache=cache))


def leak(logits: mx.array) -> mx.array:
    """Each row attends to a little of the row before it."""
    return logits + 0.05 * mx.roll(logits, 1, axis=0)


def sicken(logits: mx.array) -> mx.array:
    """The logits of wider batches are NaN."""
    return logits * mx.nan if logits.shape[0] > 1 else logits


def raise_on_two(logits: mx.array) -> mx.array:
    if logits.shape[0] > 1:
        raise RuntimeError("one row only")
    return logits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (leak, r"gives other results in a batch than alone \(logits differ by 0\.\d+"),
        (sicken, r"gives other results in a batch than alone \(logits differ by inf"),
        (raise_on_two, r"different lengths \(RuntimeError: one row only\)"),
    ],
)
def test_a_model_that_batches_wrongly_is_served_one_row_at_a_time(llama, change, reason):
    form = choose_form(replace(llama, model=Altered(llama.model, change)))
    assert form == ALONE
    assert re.search(reason, form.reason)


def test_a_model_that_fails_in_every_form_runs_one_by_one_for_the_plainest_reason(
    llama, monkeypatch
):
    def refuse(*arguments: Any) -> Any:
        raise TypeError("not my kind of cache")

    monkeypatch.setattr(
        "mlx_dp.kvcache.batch.batched_kv_cache.BatchedKVCache.update_and_fetch", refuse
    )
    form = choose_form(llama)
    assert form == ALONE
    assert "different lengths (TypeError: not my kind of cache" in form.reason


def test_a_mixed_chunk_that_goes_wrong_costs_the_form_that_has_them(llama, monkeypatch, caplog):
    monkeypatch.setattr("mlx_dp.kvcache.batch.mixed_chunk.MixedChunk.mask", lambda *_: None)
    with caplog.at_level(logging.INFO):
        assert choose_form(llama) == ONE_SLAB
    assert "gives other results" in caplog.text


def test_windows_that_go_wrong_only_in_a_batch_are_found(tmp_path, monkeypatch):
    model = loaded(ARCHITECTURES["gemma3_text"], tmp_path)

    def in_time(kv: LayerKV, length: int) -> LayerKV:
        return kv

    monkeypatch.setattr("mlx_dp.kvcache.batch.batch_caches.to_ring", in_time)
    form = choose_form(model)
    assert form == ALONE
    assert "gives other results" in form.reason


def test_states_that_change_rows_in_a_batch_are_found(tmp_path, monkeypatch):
    model = loaded(ARCHITECTURES["qwen3_next"], tmp_path)
    monkeypatch.setattr(
        "mlx_dp.kvcache.batch.kv_step.KVStep.keys",
        property(lambda step: tuple(row.key for slab in step._slabs for row in slab.rows)[::-1]),
    )
    form = choose_form(model)
    assert form == ALONE
    assert "gives other results" in form.reason


def test_masks_that_go_wrong_only_in_one_slab_are_found(llama, monkeypatch):
    # With several slabs or a mixed chunk the shared function masks by itself.
    shared = sys.modules["mlx_lm.models.llama"].scaled_dot_product_attention

    def unmasked(*arguments: Any, mask: Any, **named: Any) -> mx.array:
        ignored = isinstance(mask, mx.array)
        return shared(*arguments, mask=None if ignored else mask, **named)

    monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", unmasked)
    form = choose_form(llama)
    assert form == ALONE
    assert "gives other results" in form.reason


def test_running_out_of_memory_is_not_the_models_fault(llama):
    def exhaust(logits: mx.array) -> mx.array:
        if logits.shape[0] > 1:
            raise RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")
        return logits

    with pytest.raises(RuntimeError, match="Unable to allocate"):
        choose_form(replace(llama, model=Altered(llama.model, exhaust)))


def test_positions_that_go_wrong_only_in_a_batch_are_found(llama, monkeypatch):
    rope = mx.fast.rope

    def forgetful(*arguments: Any, offset: Any, **named: Any) -> mx.array:
        if isinstance(offset, mx.array) and offset.size > 1:
            offset = mx.minimum(offset, 4)
        return rope(*arguments, offset=offset, **named)

    monkeypatch.setattr(mx.fast, "rope", forgetful)
    form = choose_form(llama)
    assert form == ALONE
    assert "gives other results" in form.reason
