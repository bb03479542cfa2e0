"""Loading measures whether steps copy the KV that they write to."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_slab import KVSlab
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.worker.loading.batch_check import choose_form
from mlx_dp.worker.loading.kv_writes import copied_share, steps_copy
from mlx_dp.worker.loading.loaded_model import LoadedModel, load
from tests.support.batches.held_inputs import inputs_held
from tests.support.models.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.mlx

IN_SLABS = BatchForm(split=True)
WITH_TAILS = BatchForm(split=True, tails=True)

Load = Callable[[str], LoadedModel]


@pytest.fixture
def tiny(tmp_path: Path) -> Load:
    return lambda name: load(ARCHITECTURES[name].write(tmp_path))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_what_a_wider_slab_costs_a_step_is_nothing_or_all_of_it(name, tiny):
    model = tiny(name)
    assert abs(copied_share(model, IN_SLABS)) < 0.1
    assert abs(copied_share(model, WITH_TAILS)) < 0.1
    with inputs_held():
        assert copied_share(model, IN_SLABS) > 0.9
        assert abs(copied_share(model, WITH_TAILS)) < 0.1


def test_tails_are_chosen_where_steps_copy(tiny):
    model = tiny("llama")
    assert choose_form(model).batching is Batching.SEVERAL_SLABS
    with inputs_held():
        assert choose_form(model).batching is Batching.SLABS_WITH_TAILS


def test_a_model_that_attends_to_one_array_keeps_it_with_a_warning(tiny, caplog):
    model = tiny("stablelm")
    with inputs_held(), caplog.at_level(logging.WARNING, "mlx_dp.worker.loading.batch_check"):
        assert choose_form(model) == BatchForm(split=False)
    assert "each step copies all KV, since with tails this model attends to one" in caplog.text


def test_tails_that_give_other_results_are_not_chosen(tiny, monkeypatch, caplog):
    """Their check is the one that every form has to pass."""
    write = KVSlab.write

    def lose_the_tail(slab: KVSlab, *arguments: Any) -> Any:
        seen = write(slab, *arguments)
        return seen if len(seen) == 1 else (seen[0], seen[1].tokens(0, 1))

    monkeypatch.setattr(KVSlab, "write", lose_the_tail)
    with inputs_held(), caplog.at_level(logging.WARNING, "mlx_dp.worker.loading.batch_check"):
        assert choose_form(tiny("llama")) == IN_SLABS
    assert "with tails this model gives other results" in caplog.text


def test_a_model_without_growing_kv_has_nothing_to_copy(tiny):
    with inputs_held():
        assert not steps_copy(tiny("mamba"), IN_SLABS)
