"""What every engine must keep, whatever runs in it.

A subclass gives ``make_engine``, which returns a loaded engine that is not open yet.
"""

from collections.abc import Callable, Sequence

import pytest

from mlx_dp.proto.ownership import OwnerCapacity
from mlx_dp.proto.sampling_params import SamplingParams
from mlx_dp.worker.engine import Drawn, Engine, EngineRequest, PrefillChunk, StepPlan

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
EMPTY = StepPlan()
MAX_STEPS = 500


def request(
    *prompt: int,
    max_tokens: int = 6,
    output_ids: Sequence[int] = (),
    params: SamplingParams = GREEDY,
) -> EngineRequest:
    return EngineRequest(
        prompt_ids=prompt, output_ids=tuple(output_ids), max_tokens=max_tokens, params=params
    )


REQUESTS = (
    request(1, 2, 3, 4, 5, 6, 7),
    request(9, max_tokens=3),
    request(3, 1, 4, 1, 5, params=SAMPLED, max_tokens=9),
    request(2, 7, 1, 8, 2, 8, max_tokens=1),
)


def prefill(slot: int, num_tokens: int) -> StepPlan:
    return StepPlan(prefill=(PrefillChunk(slot=slot, num_tokens=num_tokens),))


def whole(**requests: EngineRequest) -> StepPlan:
    """One step that prefills all of these, named ``s0``, ``s1`` after their slots."""
    return StepPlan(
        prefill=tuple(
            PrefillChunk(slot=int(name[1:]), num_tokens=given.prefill_tokens)
            for name, given in requests.items()
        )
    )


def finish(engine: Engine) -> list[tuple[Drawn, ...]]:
    """Step until nothing is under way."""
    steps: list[tuple[Drawn, ...]] = []
    while engine.busy:
        assert len(steps) < MAX_STEPS, "the engine never becomes idle"
        steps.append(engine.step(EMPTY))
    return steps


def tokens_of(steps: Sequence[tuple[Drawn, ...]], slot: int) -> list[int]:
    return [drawn.token for step in steps for drawn in step if drawn.slot == slot]


class EngineContract:
    """Inherited by one class of tests per engine."""

    @pytest.fixture
    def engine(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        engine.open(OwnerCapacity(request_slots=4, auxiliary_slots=4, pool_tokens=1_000))
        engine.warm_up()
        return engine

    def alone(self, engine: Engine, given: EngineRequest, slot: int = 0) -> list[int]:
        engine.add(slot, given)
        steps = [engine.step(prefill(slot, given.prefill_tokens)), *finish(engine)]
        engine.remove(slot)
        return tokens_of(steps, slot)

    def test_a_warm_engine_is_idle_and_empty(self, engine: Engine) -> None:
        assert not engine.busy
        assert engine.memory().used_tokens == 0
        assert engine.step(EMPTY) == ()
        assert not engine.busy

    def test_a_slot_beyond_the_capacity_is_our_bug(self, engine: Engine) -> None:
        for slot in (-1, 4):
            with pytest.raises(AssertionError):
                engine.add(slot, REQUESTS[0])

    def test_a_step_decodes_the_slots_whose_prompts_it_ends(self, engine: Engine) -> None:
        engine.add(0, REQUESTS[0])
        engine.add(1, REQUESTS[2])
        engine.step(prefill(0, 7))
        engine.step(prefill(1, 5))
        assert [drawn.slot for drawn in engine.step(EMPTY)] == [0, 1]

    def test_tokens_are_returned_by_the_call_after_the_one_that_launched_them(
        self, engine: Engine
    ) -> None:
        engine.add(0, REQUESTS[0])
        assert not engine.busy
        assert engine.step(prefill(0, 7)) == ()
        assert engine.busy
        (first,) = engine.step(EMPTY)
        assert first.slot == 0

    def test_a_budget_is_drawn_to_its_last_token_and_not_beyond(self, engine: Engine) -> None:
        for given in REQUESTS:
            assert len(self.alone(engine, given)) == given.max_tokens
            assert not engine.busy

    def test_tokens_lie_within_the_vocabulary(self, engine: Engine) -> None:
        vocab_size = engine.facts.shape.vocab_size
        assert all(
            0 <= token < vocab_size for given in REQUESTS for token in self.alone(engine, given)
        )

    def test_the_same_request_gives_the_same_tokens_in_any_slot(self, engine: Engine) -> None:
        for given in REQUESTS:
            assert self.alone(engine, given, slot=0) == self.alone(engine, given, slot=3)

    def test_a_request_is_independent_of_the_batch(self, engine: Engine) -> None:
        alone = [self.alone(engine, given) for given in REQUESTS]
        for slot, given in enumerate(REQUESTS):
            engine.add(slot, given)
        plan = whole(**{f"s{slot}": given for slot, given in enumerate(REQUESTS)})
        steps = [engine.step(plan), *finish(engine)]
        assert [tokens_of(steps, slot) for slot in range(4)] == alone

    def test_joining_and_leaving_change_nothing_for_the_others(self, engine: Engine) -> None:
        stays, joins, leaves = REQUESTS[0], REQUESTS[1], REQUESTS[2]
        alone = self.alone(engine, stays), self.alone(engine, joins)
        engine.add(0, leaves)
        engine.add(1, stays)
        steps = [engine.step(whole(s0=leaves, s1=stays)), engine.step(EMPTY)]
        engine.remove(0)
        engine.add(0, joins)
        steps = [*steps, engine.step(prefill(0, 1)), *finish(engine)]
        assert tokens_of(steps, 1) == alone[0]
        assert tokens_of(steps[2:], 0) == alone[1]

    def test_results_come_in_the_order_in_which_requests_were_added(self, engine: Engine) -> None:
        for slot, given in ((3, REQUESTS[0]), (0, REQUESTS[2]), (2, REQUESTS[0])):
            engine.add(slot, given)
        engine.step(prefill(2, 7))
        engine.step(prefill(0, 5))
        steps = [engine.step(prefill(3, 7)), *finish(engine)]
        assert [drawn.slot for drawn in steps[1]] == [3, 0, 2]

    @pytest.mark.parametrize("chunks", [(1, 6), (3, 3, 1), (6, 1)])
    def test_chunks_make_no_difference(self, chunks: tuple[int, ...], engine: Engine) -> None:
        alone = self.alone(engine, REQUESTS[0])
        engine.add(1, REQUESTS[0])
        steps = [engine.step(prefill(1, num_tokens)) for num_tokens in chunks]
        assert tokens_of(steps, 1) == []
        assert tokens_of(finish(engine), 1) == alone

    def test_a_prompt_that_is_partly_in_draws_nothing(self, engine: Engine) -> None:
        engine.add(0, REQUESTS[0])
        engine.add(1, REQUESTS[1])
        engine.step(
            StepPlan(
                prefill=(
                    PrefillChunk(slot=0, num_tokens=4),
                    PrefillChunk(slot=1, num_tokens=1),
                )
            )
        )
        assert tokens_of(finish(engine), 0) == []

    @pytest.mark.parametrize("given", [REQUESTS[0], REQUESTS[2]], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("emitted", [1, 3, 5])
    def test_an_answer_goes_on_where_an_earlier_owner_left_it(
        self, emitted: int, given: EngineRequest, engine: Engine
    ) -> None:
        answer = self.alone(engine, given)
        goes_on = request(
            *given.prompt_ids,
            output_ids=answer[:emitted],
            max_tokens=given.max_tokens,
            params=given.params,
        )
        assert self.alone(engine, goes_on, slot=1) == answer[emitted:]

    def test_removal_drops_the_surplus_token_under_way(self, engine: Engine) -> None:
        engine.add(0, REQUESTS[0])
        engine.add(1, REQUESTS[2])
        engine.step(whole(s0=REQUESTS[0], s1=REQUESTS[2]))
        engine.step(EMPTY)
        engine.remove(0)
        assert [drawn.slot for drawn in engine.step(EMPTY)] == [1]

    def test_a_slot_taken_again_gets_none_of_the_tokens_of_its_last_request(
        self, engine: Engine
    ) -> None:
        alone = self.alone(engine, REQUESTS[1])
        engine.add(0, REQUESTS[0])
        engine.step(prefill(0, 7))
        engine.step(EMPTY)
        engine.remove(0)
        engine.add(0, REQUESTS[1])
        steps = [engine.step(prefill(0, 1)), *finish(engine)]
        assert steps[0] == ()
        assert tokens_of(steps, 0) == alone

    def test_a_request_can_be_removed_in_the_middle_of_its_prompt(self, engine: Engine) -> None:
        alone = self.alone(engine, REQUESTS[0])
        engine.add(0, REQUESTS[0])
        engine.step(prefill(0, 3))
        engine.remove(0)
        assert tokens_of(finish(engine), 0) == []
        assert engine.memory().used_tokens == 0
        assert self.alone(engine, REQUESTS[0]) == alone

    def test_a_request_can_be_removed_before_anything_ran(self, engine: Engine) -> None:
        engine.add(0, REQUESTS[0])
        engine.remove(0)
        assert not engine.busy

    def test_log_probabilities_come_when_asked_for(self, engine: Engine) -> None:
        asks = request(1, 2, 3, params=SamplingParams(temperature=0.0, logprobs=3))
        engine.add(0, asks)
        engine.add(1, REQUESTS[0])
        steps = [engine.step(whole(s0=asks, s1=REQUESTS[0])), *finish(engine)]
        for drawn in (drawn for step in steps for drawn in step):
            if drawn.slot == 1:
                assert drawn.logprob is None
                continue
            assert drawn.logprob is not None
            ids = [token for token, _ in drawn.logprob.top]
            values = [logprob for _, logprob in drawn.logprob.top]
            assert len(set(ids)) == 3
            assert values == sorted(values, reverse=True)
            assert ids[0] == drawn.token
            assert drawn.logprob.logprob == pytest.approx(values[0])
            assert drawn.logprob.logprob <= 0.0

    def test_what_is_held_is_counted_and_given_back(self, engine: Engine) -> None:
        engine.add(0, REQUESTS[0])
        engine.step(prefill(0, 7))
        engine.step(EMPTY)
        assert 7 <= engine.memory().used_tokens <= 7 + REQUESTS[0].max_tokens
        engine.remove(0)
        finish(engine)
        assert engine.memory().used_tokens == 0
