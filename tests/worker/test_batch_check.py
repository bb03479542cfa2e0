"""What a model's batch may look like is found out by running one, and refused with the reason."""

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
from tiny_models import DENSE, DYNAMIC_ROPE, TINY_MODELS, TinyModel

from mlx_dp.kvcache.batch_form import BatchForm
from mlx_dp.worker.batch_check import choose_form
from mlx_dp.worker.engine import UnsupportedModelError
from mlx_dp.worker.loaded_model import LoadedModel, load

pytestmark = pytest.mark.mlx

SPLIT = BatchForm(split=True)
ONE_ROW = BatchForm(split=False, single=True)
ONE_SLAB = BatchForm(split=False)
NOT_SPLIT = {
    "deepseek_v3": (ONE_SLAB, "makes its own masks"),
    "stablelm": (ONE_SLAB, "changes keys after it cached them"),
    "gemma2": (BatchForm(split=False, grouped_mask=True), "makes its own masks"),
}


def loaded(tiny: TinyModel, directory: Path) -> LoadedModel:
    return load(tiny.write(directory))


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    return loaded(DENSE["llama"], tmp_path)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tiny_model_gets_its_form(name, tmp_path, caplog):
    form, reason = NOT_SPLIT.get(name, (SPLIT, ""))
    with caplog.at_level(logging.INFO):
        assert choose_form(loaded(TINY_MODELS[name], tmp_path)) == form
    assert reason in caplog.text
    assert bool(reason) == bool(caplog.records)


def test_dynamic_rope_is_served_one_row_at_a_time(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        form = choose_form(loaded(DYNAMIC_ROPE, tmp_path))
    assert form == ONE_ROW
    assert "requests of different lengths (ValueError" in caplog.text


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
    """A model with something done to its logits."""

    model: Any
    change: Callable[[mx.array], mx.array]

    @property
    def layers(self) -> Any:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return self.change(self.model(tokens, cache=cache))


def leak(logits: mx.array) -> mx.array:
    """Each row sees a little of the row before it."""
    return logits + 0.05 * mx.roll(logits, 1, axis=0)


def sicken(logits: mx.array) -> mx.array:
    """Wider batches are not numbers any more."""
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
def test_a_model_that_batches_wrongly_is_served_one_row_at_a_time(llama, change, reason, caplog):
    with caplog.at_level(logging.INFO):
        assert choose_form(replace(llama, model=Altered(llama.model, change))) == ONE_ROW
    assert re.search(reason, caplog.text)


def test_a_model_that_fails_in_every_form_is_refused_with_the_plainest_reason(llama, monkeypatch):
    def refuse(*arguments: Any) -> Any:
        raise TypeError("not my kind of cache")

    monkeypatch.setattr("mlx_dp.kvcache.batched_kv_cache.BatchedKVCache.update_and_fetch", refuse)
    reason = r"different lengths \(TypeError: not my kind of cache"
    with pytest.raises(UnsupportedModelError, match=reason):
        choose_form(llama)


def test_masks_that_go_wrong_only_in_one_slab_are_found(llama, monkeypatch, caplog):
    # Where rows are in several slabs, or a guest rides, the shared function masks by itself.
    shared = sys.modules["mlx_lm.models.llama"].scaled_dot_product_attention

    def unmasked(*arguments: Any, mask: Any, **named: Any) -> mx.array:
        ignored = isinstance(mask, mx.array)
        return shared(*arguments, mask=None if ignored else mask, **named)

    monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", unmasked)
    with caplog.at_level(logging.INFO):
        assert choose_form(llama) == ONE_ROW
    assert "gives other results" in caplog.text


def test_running_out_of_memory_is_not_the_models_fault(llama):
    def exhaust(logits: mx.array) -> mx.array:
        if logits.shape[0] > 1:
            raise RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")
        return logits

    with pytest.raises(RuntimeError, match="Unable to allocate"):
        choose_form(replace(llama, model=Altered(llama.model, exhaust)))


def test_positions_that_go_wrong_only_in_a_batch_are_found(llama, monkeypatch, caplog):
    rope = mx.fast.rope

    def forgetful(*arguments: Any, offset: Any, **named: Any) -> mx.array:
        if isinstance(offset, mx.array) and offset.size > 1:
            offset = mx.minimum(offset, 4)
        return rope(*arguments, offset=offset, **named)

    monkeypatch.setattr(mx.fast, "rope", forgetful)
    with caplog.at_level(logging.INFO):
        assert choose_form(llama) == ONE_ROW
    assert "gives other results" in caplog.text
