"""The reported memory of the MLX engine is the allocated one, and none is left at the end."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.commands import Start
from mlx_dp.worker.contract.engine import EngineRequest, PrefillChunk, StepPlan
from mlx_dp.worker.engine.mlx_engine import MlxEngine
from mlx_dp.worker.loading.device import MIN_CACHE_NBYTES
from tests.support.models.tiny_models import ARCHITECTURES, TinyModel
from tests.support.worker.chosen_forms import ChosenForms
from tests.support.worker.engine_contract import EMPTY, finish, request
from tests.support.worker.worker_starts import mlx_start

pytestmark = pytest.mark.mlx

LENGTHS = (400, 30, 201, 90)
SMALL = 3 * 2**20
"""Activations, and the rounding of Metal and malloc."""
SIZES = {"head_dim": 64, "num_key_value_heads": 4}


def wide(name: str, extra: Mapping[str, Any]) -> TinyModel:
    """Caches as large as a real model's, and little else."""
    tiny = ARCHITECTURES[name]
    return replace(tiny, extra={**tiny.extra, **extra})


MODELS = {
    "KV": wide("llama", {**SIZES, "num_hidden_layers": 12}),
    "windows": wide("gemma3_text", {**SIZES, "num_hidden_layers": 12, "sliding_window": 100}),
    "states": wide(
        "qwen3_next",
        {
            **SIZES,
            "num_hidden_layers": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "one by one": wide("llama_dynamic_rope", {**SIZES, "num_hidden_layers": 12}),
}


FORMS = ChosenForms()


def loaded(name: str, start: Start) -> MlxEngine:
    with FORMS.remembered(name):
        return MlxEngine.load(start)


class Held:
    """An engine, and the device's memory beyond that of the warm engine."""

    def __init__(self, name: str, directory: Path, cache_nbytes: int | None) -> None:
        self.engine = loaded(name, mlx_start(MODELS[name].write(directory)))
        self.engine.open(
            OwnerCapacity(
                request_slots=len(LENGTHS),
                auxiliary_slots=16,
                pool_tokens=10_000,
                cache_nbytes=cache_nbytes,
            )
        )
        self.engine.warm_up()
        self._before = 0
        self._before = self.allocated_beyond_warm()

    def allocated_beyond_warm(self) -> int:
        mx.synchronize()
        mx.clear_cache()
        return mx.get_active_memory() - self._before

    def expect_true(self) -> int:
        held = self.engine.held_nbytes
        found = self.allocated_beyond_warm()
        assert abs(found - held) < SMALL, (found, held)
        return held

    def prefill(self, slot: int, num_tokens: int, saves: tuple[Save, ...] = ()) -> None:
        snapshot = slot if saves and self.engine.facts.stateful else None
        chunk = PrefillChunk(slot=slot, num_tokens=num_tokens, saves=saves, snapshot=snapshot)
        self.engine.step(StepPlan(prefill=(chunk,)))


@pytest.mark.parametrize("cache_nbytes", [None, 10**6], ids=["room to spare", "none to spare"])
@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_held_is_counted_and_nothing_is_left(name, cache_nbytes, tmp_path):
    held = Held(name, tmp_path, cache_nbytes)
    engine = held.engine
    assert held.expect_true() == 0
    for slot, length in enumerate(LENGTHS):
        engine.add(slot, prompt_of(length, slot))
        counted = held.expect_true() + engine.growth_nbytes()
        held.prefill(slot, length // 2)
        # Counted as nothing yet: room for all of it was set aside, and is made before it joins
        # only where there is so much to spare.
        assert cache_nbytes is None or engine.held_nbytes <= counted
        filled = held.allocated_beyond_warm() - engine.held_nbytes
        assert filled < engine.row_nbytes(length) + SMALL
        saves = (Save(slot, 0, length - 1),) if engine.facts.prefix_cache else ()
        held.prefill(slot, length - length // 2, saves)
        held.expect_true()
    for _ in range(3):
        engine.step(EMPTY)
    assert held.expect_true() > SMALL
    for slot in (2, 0):
        engine.remove(slot)
    engine.step(EMPTY)
    held.expect_true()
    engine.compact()
    held.expect_true()
    for slot in (1, 3):
        engine.remove(slot)
    finish(engine)
    engine.drop(range(4), range(4))
    assert engine.held_nbytes == 0
    assert held.expect_true() == 0


def test_a_forgotten_prefix_of_a_row_does_not_come_back(tmp_path):
    held = Held("states", tmp_path, None)
    engine = held.engine
    for slot, length in enumerate(LENGTHS[:2]):
        engine.add(slot, prompt_of(length, slot))
        held.prefill(slot, length)
    engine.save_prefix(0, (Save(1, 0, 300),), 1)
    engine.remove(0)
    engine.drop([1], [1])
    engine.step(EMPTY)
    engine.remove(1)
    finish(engine)
    assert held.expect_true() == 0


@pytest.fixture
def _limits_of_mlx():
    """The limits are the process's: restore those of other tests."""
    memory, cache = mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)
    mx.clear_cache()
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.usefixtures("_limits_of_mlx")
def test_free_buffers_stay_within_what_a_small_pool_can_use_whatever_the_share_is(tmp_path):
    directory = MODELS["KV"].write(tmp_path)
    start = mlx_start(directory, memory_nbytes=8 * 2**30)
    engine = loaded("KV", replace(start, share=replace(start.share, max_total_tokens=1_000)))
    pool_nbytes = engine.facts.shape.kv_nbytes(1_000)
    bound = max(MIN_CACHE_NBYTES, pool_nbytes)
    engine.open(
        OwnerCapacity(
            request_slots=4, auxiliary_slots=0, pool_tokens=1_000, cache_nbytes=pool_nbytes
        )
    )
    engine.warm_up()
    assert 0 < most_free_buffers(engine) <= bound
    # The same work keeps more where a tenth of the share is the only bound.
    mx.set_cache_limit(start.memory_nbytes // 10)
    assert most_free_buffers(engine) > bound


def most_free_buffers(engine: MlxEngine) -> int:
    """Run prompts of many lengths, and return the most bytes that MLX kept for reuse."""
    most = 0
    for turn in range(5):
        length = 100 + 200 * turn
        engine.add(0, prompt_of(length, turn))
        engine.step(StepPlan(prefill=(PrefillChunk(slot=0, num_tokens=length),)))
        engine.remove(0)
        finish(engine)
        engine.compact()
        most = max(most, mx.get_cache_memory())
    return most


def prompt_of(length: int, salt: int) -> EngineRequest:
    return request(*((7 * at + salt) % 250 for at in range(length)), max_tokens=60)
