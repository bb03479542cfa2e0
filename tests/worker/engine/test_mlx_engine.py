"""The MLX engine keeps the contract, and its output is mlx-lm's for a single request."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.worker.contract.engine import Engine, EngineRequest, StepPlan
from mlx_dp.worker.engine.mlx_engine import MlxEngine
from mlx_dp.worker.grammar.compiler import GrammarCompiler
from tests.support.models.tiny_models import (
    ARCHITECTURES,
    DENSE,
    DYNAMIC_ROPE,
    TINY_MODELS,
    TinyModel,
)
from tests.support.worker.chosen_forms import ChosenForms
from tests.support.worker.engine_contract import (
    EMPTY,
    EngineContract,
    PrefixContract,
    chunk,
    prefill,
    prefix,
    request,
)
from tests.support.worker.worker_starts import mlx_start

pytestmark = pytest.mark.mlx

CONTRACT_MODELS = {
    "in several slabs": DENSE["llama"],
    "in one slab": DENSE["stablelm"],
    "latent attention": TINY_MODELS["deepseek_v2"],
    "windows": ARCHITECTURES["gemma3_text"],
    "states": ARCHITECTURES["qwen3_next"],
    "states and windows in lists": ARCHITECTURES["baichuan_m1"],
    "one by one": DYNAMIC_ROPE,
}


@pytest.fixture(scope="module")
def forms() -> ChosenForms:
    return ChosenForms()


@pytest.fixture(scope="module", params=CONTRACT_MODELS)
def contract_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return CONTRACT_MODELS[request.param].write(tmp_path_factory.mktemp("model") / request.param)


class TestMlxEngineContract(EngineContract):
    @pytest.fixture
    def make_engine(
        self, contract_model: Path, forms: ChosenForms
    ) -> Iterator[Callable[[], Engine]]:
        made: list[MlxEngine] = []

        def make() -> Engine:
            with forms.remembered(contract_model.name):
                made.append(MlxEngine.load(mlx_start(contract_model)))
            return made[-1]

        yield make
        for engine in made:
            engine.close()


PREFIX_MODELS = [name for name in CONTRACT_MODELS if name != "one by one"]


class TestMlxPrefixContract(PrefixContract):
    @pytest.fixture
    def make_engine(
        self,
        request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory,
        forms: ChosenForms,
    ) -> Iterator[Callable[[], Engine]]:
        directory = CONTRACT_MODELS[request.param].write(tmp_path_factory.mktemp("model"))
        made: list[MlxEngine] = []

        def make() -> Engine:
            with forms.remembered(request.param):
                made.append(MlxEngine.load(mlx_start(directory)))
            return made[-1]

        yield make
        for engine in made:
            engine.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is TestMlxPrefixContract:
        metafunc.parametrize("make_engine", PREFIX_MODELS, indirect=True)


def test_the_tokenizer_for_grammars_is_read_before_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[GrammarCompiler] = []
    monkeypatch.setattr(GrammarCompiler, "warm_up", lambda compiler: read.append(compiler))
    engine = MlxEngine.load(mlx_start(WIDE.write(tmp_path)))
    engine.open(OwnerCapacity(request_slots=1, auxiliary_slots=0, pool_tokens=1_000))
    engine.warm_up()
    assert len(read) == 1
    engine.close()


WIDE = TinyModel("llama", {"num_hidden_layers": 12, "head_dim": 64, "num_key_value_heads": 4})
"""KV as large as a real model's, and little else."""
TOKEN_NBYTES = 2 * 12 * 4 * 64 * 4
PROMPT = 400
ROWS = 8
SMALL = 4 * 2**20


class TestWhatAStepCopies:
    @pytest.fixture
    def engine(self, tmp_path: Path, forms: ChosenForms) -> MlxEngine:
        """Eight rows of 512 tokens decode; a ninth slot is free."""
        with forms.remembered("wide"):
            engine = MlxEngine.load(mlx_start(WIDE.write(tmp_path)))
        engine.open(OwnerCapacity(request_slots=ROWS + 1, auxiliary_slots=0, pool_tokens=10_000))
        engine.warm_up()
        # All go on from what the first one leaves: a prompt takes longer than all that follows.
        shared = PROMPT - ROWS
        engine.add(0, prompt_of(PROMPT))
        first = chunk(engine, 0, PROMPT, saves=(Save(1, 0, shared),))
        engine.step(StepPlan(prefill=(first,)))
        for slot in range(1, ROWS):
            engine.add(slot, prompt_of(PROMPT - slot))
            cached = prefix(engine, (1, shared), snapshot=0)
            rest = chunk(engine, slot, PROMPT - slot - shared, prefix=cached)
            engine.step(StepPlan(prefill=(rest,)))
        engine.drop([1], [])
        for _ in range(3):
            engine.step(EMPTY)
        mx.synchronize()
        return engine

    def peak_nbytes(self, work: Callable[[], object]) -> int:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        return mx.get_peak_memory() - before

    def test_a_steady_step_copies_none_of_100_mb(self, engine: MlxEngine) -> None:
        assert engine.memory().used_tokens * TOKEN_NBYTES > 75 * 10**6

        def steps() -> None:
            for _ in range(6):
                engine.step(EMPTY)

        assert self.peak_nbytes(steps) < SMALL

    def test_a_removal_copies_one_row(self, engine: MlxEngine) -> None:
        def remove() -> None:
            engine.remove(1)
            engine.step(EMPTY)
            engine.step(EMPTY)

        assert self.peak_nbytes(remove) < PROMPT * TOKEN_NBYTES * 1.1 + SMALL

    def test_a_removal_itself_moves_nothing(self, engine: MlxEngine) -> None:
        # The step in flight reads the KV: moving a row now would wait for it, and delay the
        # event that the slot is free.
        engine.step(EMPTY)
        assert self.peak_nbytes(lambda: engine.remove(1)) < SMALL // 4

    def test_removing_all_frees_their_kv_at_once(self, engine: MlxEngine) -> None:
        for slot in range(ROWS):
            engine.remove(slot)
        assert engine.memory().used_tokens == 0
        assert not engine.step(EMPTY)
        assert not engine.busy

    def test_chunks_beside_a_decode_do_not_copy_what_is_prefilled(self, engine: MlxEngine) -> None:
        engine.add(ROWS, prompt_of(480))
        engine.step(prefill(ROWS, 32))
        engine.step(prefill(ROWS, 32))

        def chunks() -> None:
            for _ in range(4):
                engine.step(prefill(ROWS, 32))

        assert self.peak_nbytes(chunks) < SMALL + 32 * TOKEN_NBYTES

    def test_a_slab_grows_while_the_prompt_that_will_need_it_is_prefilled(
        self, engine: MlxEngine
    ) -> None:
        held = [engine.held_nbytes]
        engine.add(ROWS, prompt_of(441))
        for _ in range(4):
            engine.step(prefill(ROWS, 110))
            held.append(engine.held_nbytes)
        assert held == sorted(set(held))
        assert held[-1] == 2 * held[0]
        engine.step(prefill(ROWS, 1))
        assert engine.held_nbytes == held[-1]


def prompt_of(length: int) -> EngineRequest:
    return request(*(7 * i % 250 for i in range(length)), max_tokens=60)


@pytest.mark.parametrize(
    ("name", "batching", "reason"),
    [("one by one", "one_by_one", "requests of different lengths"), ("llama", "several_slabs", "")],
)
def test_the_form_of_the_batch_is_told_with_its_reason(name, batching, reason, tmp_path):
    tiny = CONTRACT_MODELS.get(name) or DENSE[name]
    engine = MlxEngine.load(mlx_start(tiny.write(tmp_path)))
    assert engine.facts.batching == batching
    assert reason in engine.facts.unbatched_reason
    assert bool(reason) == bool(engine.facts.unbatched_reason)
    engine.close()
