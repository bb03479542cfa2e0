import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import Engine, EngineRequest
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.engine_contract import (
    EMPTY,
    EngineContract,
    PrefixContract,
    finish,
    prefill,
    request,
    tokens_of,
)
from tests.support.worker.fake_channel import VirtualTime

END_OF_TEXT = 256


def fake(**options: object) -> FakeEngine:
    return FakeEngine(
        FakeEngineOptions(**options),  # type: ignore[arg-type]
        clock=time.monotonic,
        sleep=time.sleep,
    )


class TestFakeEngineContract(EngineContract):
    @pytest.fixture(params=[False, True], ids=["attention", "hybrid"])
    def make_engine(self, request: pytest.FixtureRequest) -> Callable[[], Engine]:
        return lambda: fake(hybrid=request.param)


class TestFakePrefixContract(PrefixContract):
    @pytest.fixture(params=[False, True], ids=["attention", "hybrid"])
    def make_engine(self, request: pytest.FixtureRequest) -> Callable[[], Engine]:
        options = FakeEngineOptions(hybrid=request.param)
        return lambda: FakeEngine(
            options, clock=time.monotonic, sleep=time.sleep, prefix_cache=True
        )


def answer(engine: FakeEngine, given: EngineRequest) -> list[int]:
    engine.open(OwnerCapacity(request_slots=1, auxiliary_slots=0, pool_tokens=None))
    engine.add(0, given)
    return tokens_of([engine.step(prefill(0, given.prefill_tokens)), *finish(engine)], 0)


def test_an_answer_reads_as_words() -> None:
    text = bytes(answer(fake(), request(1, 2, max_tokens=60))).decode()
    assert all(len(word) == 5 and word.isalpha() for word in text.split())


def test_an_answer_is_the_same_on_any_worker_for_ever() -> None:
    # Written down: users compare answers over restarts and releases.
    text = bytes(answer(fake(), request(72, 105, max_tokens=18))).decode()
    assert text == "flame clean crane "


def test_an_answer_depends_on_prompt_engine_seed_and_request_seed() -> None:
    seeds = [SamplingParams(seed=1), SamplingParams(seed=2)]
    answers = [
        answer(fake(seed=seed), request(*prompt, max_tokens=30, params=params))
        for seed in (0, 1)
        for prompt in ((1, 2), (2, 1))
        for params in seeds
    ]
    assert len({tuple(tokens) for tokens in answers}) == len(answers)


def test_a_greedy_answer_does_not_depend_on_the_seed() -> None:
    first, second = (
        answer(fake(), request(1, params=SamplingParams(temperature=0.0, seed=seed)))
        for seed in (1, 2)
    )
    assert first == second


def test_no_answer_ends_by_itself_unless_a_bias_forces_the_end() -> None:
    assert END_OF_TEXT not in answer(fake(), request(5, max_tokens=500))
    forced = SamplingParams(logit_bias=((END_OF_TEXT, 100.0),))
    assert answer(fake(), request(5, max_tokens=3, params=forced)) == [END_OF_TEXT] * 3


def test_a_forced_end_waits_for_the_least_length_also_at_another_worker() -> None:
    params = SamplingParams(logit_bias=((END_OF_TEXT, 100.0),), min_tokens=4)
    given = replace(request(5, max_tokens=6, params=params), stop_token_ids=(END_OF_TEXT,))
    free = answer(fake(), request(5, max_tokens=6, params=SamplingParams()))
    whole = answer(fake(), given)
    assert whole == [*free[:4], END_OF_TEXT, END_OF_TEXT]
    for cut in range(1, 6):
        rest = answer(fake(), replace(given, output_ids=tuple(whole[:cut])))
        assert [*whole[:cut], *rest] == whole
    # A forced token that is no stop token has nothing to wait for.
    assert answer(fake(), replace(given, stop_token_ids=())) == [END_OF_TEXT] * 6


def test_a_small_vocabulary_is_kept_to() -> None:
    params = SamplingParams(logprobs=5)
    engine = fake(vocab_size=4)
    engine.open(OwnerCapacity(request_slots=1, auxiliary_slots=0, pool_tokens=None))
    engine.add(0, request(1, max_tokens=20, params=params))
    for step in (engine.step(prefill(0, 1)), *finish(engine)):
        for drawn in step:
            assert drawn.token < 4
            assert drawn.logprob is not None
            assert sorted(token for token, _ in drawn.logprob.top) == [0, 1, 2, 3]


def test_its_capacity_is_that_of_the_options() -> None:
    facts = fake(pool_tokens=77, context_length=99, vocab_size=300, hybrid=True).facts
    assert (facts.pool_tokens, facts.shape.context_length) == (77, 99)
    assert facts.shape.vocab_size == 300
    assert facts.shape.hybrid
    assert not fake().facts.shape.hybrid
    assert fake(pool_tokens=None).facts.shape.kv_bytes_per_token == 0


def test_steps_take_the_time_of_their_rates() -> None:
    passing = VirtualTime()
    engine = FakeEngine(
        FakeEngineOptions(decode_tokens_per_s=10.0, prefill_tokens_per_s=100.0),
        clock=passing.clock,
        sleep=passing.sleep,
    )
    engine.open(OwnerCapacity(request_slots=1, auxiliary_slots=0, pool_tokens=None))
    engine.add(0, request(*range(50), max_tokens=4))
    returned_at: list[float] = []
    engine.step(prefill(0, 50))
    for _ in range(4):
        engine.step(EMPTY)
        returned_at.append(round(passing.now, 6))
    assert returned_at == [0.5, 0.6, 0.7, 0.8]


def test_time_that_python_spends_is_hidden_behind_the_device() -> None:
    passing = VirtualTime()
    engine = FakeEngine(
        FakeEngineOptions(decode_tokens_per_s=10.0), clock=passing.clock, sleep=passing.sleep
    )
    engine.open(OwnerCapacity(request_slots=1, auxiliary_slots=0, pool_tokens=None))
    engine.add(0, request(1, max_tokens=11))
    engine.step(prefill(0, 1))
    for _ in range(10):
        engine.step(EMPTY)
        passing.sleep(0.04)
    engine.step(EMPTY)
    assert passing.now == pytest.approx(1.0, abs=0.05)


def test_loading_takes_as_long_as_asked() -> None:
    passing = VirtualTime()
    FakeEngine.load(FakeEngineOptions(load_s=12.5), clock=passing.clock, sleep=passing.sleep)
    assert passing.now == 12.5
