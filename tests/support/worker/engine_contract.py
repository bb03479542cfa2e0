"""The contract of every engine.

A subclass gives ``make_engine``, which returns a loaded engine that is not open yet.
"""

from collections.abc import Callable, Sequence

import pytest

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save, SegmentPart
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import Drawn, Engine, EngineRequest, PrefillChunk, StepPlan

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


def chunk(
    engine: Engine,
    slot: int,
    num_tokens: int,
    *,
    prefix: CachedPrefix | None = None,
    saves: tuple[Save, ...] = (),
    snapshot: int | None = None,
) -> PrefillChunk:
    """One chunk; its state fields are left out for models without states."""
    stateful = engine.facts.stateful
    return PrefillChunk(
        slot=slot,
        num_tokens=num_tokens,
        prefix=prefix,
        saves=saves,
        snapshot=snapshot if stateful else None,
    )


def prefix(engine: Engine, *pieces: tuple[int, int], snapshot: int) -> CachedPrefix:
    """``pieces`` are segments with their numbers of tokens."""
    return CachedPrefix(
        pieces=tuple(SegmentPart(*piece) for piece in pieces),
        num_tokens=sum(num_tokens for _, num_tokens in pieces),
        snapshot=snapshot if engine.facts.stateful else None,
    )


def finish(engine: Engine) -> list[tuple[Drawn, ...]]:
    """Step until no step is in flight."""
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


PROMPT = tuple(range(1, 41))


class PrefixContract:
    """The contract of an engine with the prefix cache, on top of ``EngineContract``.

    Slots 0 to 3 have states, and segments are any numbers.
    """

    @pytest.fixture
    def engine(self, make_engine: Callable[[], Engine]) -> Engine:
        engine = make_engine()
        assert engine.facts.prefix_cache
        engine.open(OwnerCapacity(request_slots=4, auxiliary_slots=16, pool_tokens=1_000))
        engine.warm_up()
        return engine

    def run(self, engine: Engine, given: EngineRequest, *chunks: PrefillChunk) -> list[int]:
        """Run a request alone in slot 0, without removing it."""
        engine.add(0, given)
        plans = [StepPlan(prefill=(one,)) for one in chunks]
        if not plans:
            plans = [prefill(0, given.prefill_tokens)]
        steps = [*(engine.step(plan) for plan in plans), *finish(engine)]
        return tokens_of(steps, 0)

    def run_and_keep(
        self, engine: Engine, given: EngineRequest, save: Save, snapshot: int
    ) -> list[int]:
        """Run a request alone in slot 0, and keep it once the step of its last token is launched.

        The next step would find it gone.
        """
        engine.add(0, given)
        steps = [engine.step(prefill(0, given.prefill_tokens))]
        steps += [engine.step(EMPTY) for _ in range(given.max_tokens - 1)]
        # Keeping one prefix may drop another one for its memory.
        engine.drop((99,), ())
        engine.save_prefix(0, (save,), snapshot if engine.facts.stateful else None)
        steps += finish(engine)
        engine.remove(0)
        return tokens_of(steps, 0)

    def cold(self, engine: Engine, given: EngineRequest) -> list[int]:
        tokens = self.run(engine, given)
        engine.remove(0)
        return tokens

    def test_a_prompt_goes_on_from_what_another_saved(self, engine: Engine) -> None:
        longer = request(*PROMPT, 7, 8, 9)
        cold = self.cold(engine, longer)
        saved = chunk(engine, 0, 40, saves=(Save(5, 0, 39),), snapshot=2)
        self.run(engine, request(*PROMPT), saved)
        engine.remove(0)
        begun = prefix(engine, (5, 39), snapshot=2)
        assert self.run(engine, longer, chunk(engine, 0, 4, prefix=begun)) == cold

    def test_all_of_a_prompt_but_its_last_token_can_be_taken_over(self, engine: Engine) -> None:
        cold = self.run(
            engine, request(*PROMPT), chunk(engine, 0, 40, saves=(Save(5, 0, 39),), snapshot=2)
        )
        engine.remove(0)
        again = chunk(engine, 0, 1, prefix=prefix(engine, (5, 39), snapshot=2))
        assert self.run(engine, request(*PROMPT), again) == cold

    def test_what_a_chunk_saves_a_later_one_in_the_plan_begins_with(self, engine: Engine) -> None:
        other = request(*PROMPT, 3, 3)
        cold = self.cold(engine, other)
        engine.add(0, request(*PROMPT))
        engine.add(1, other)
        begun = prefix(engine, (5, 39), snapshot=2)
        plan = StepPlan(
            prefill=(
                chunk(engine, 0, 40, saves=(Save(5, 0, 39),), snapshot=2),
                chunk(engine, 1, 3, prefix=begun),
            )
        )
        assert tokens_of([engine.step(plan), *finish(engine)], 1) == cold

    def test_segments_follow_each_other_and_can_be_split(self, engine: Engine) -> None:
        other = request(*PROMPT[:30], 3, 3)
        cold = self.cold(engine, other)
        self.run(
            engine,
            request(*PROMPT),
            chunk(engine, 0, 30, snapshot=1),
            chunk(engine, 0, 10, saves=(Save(5, 0, 10), Save(6, 10, 39)), snapshot=2),
        )
        engine.remove(0)
        engine.split(6, 20, 7)
        begun = prefix(engine, (5, 10), (7, 20), snapshot=1)
        assert self.run(engine, other, chunk(engine, 0, 2, prefix=begun)) == cold
        engine.remove(0)
        whole = prefix(engine, (5, 10), (7, 20), (6, 9), snapshot=2)
        again = self.run(engine, request(*PROMPT), chunk(engine, 0, 1, prefix=whole))
        assert again == self.cold_of_prompt(engine)

    def cold_of_prompt(self, engine: Engine) -> list[int]:
        engine.remove(0)
        return self.cold(engine, request(*PROMPT))

    def test_a_piece_can_be_the_beginning_of_a_segment(self, engine: Engine) -> None:
        other = request(*PROMPT[:20], 3, 3)
        cold = self.cold(engine, other)
        self.run(
            engine,
            request(*PROMPT),
            chunk(engine, 0, 20, snapshot=1),
            chunk(engine, 0, 20, saves=(Save(5, 0, 39),), snapshot=2),
        )
        engine.remove(0)
        begun = prefix(engine, (5, 20), snapshot=1)
        assert self.run(engine, other, chunk(engine, 0, 2, prefix=begun)) == cold

    @pytest.mark.parametrize("max_tokens", [1, 2, 6])
    def test_an_answer_is_kept_with_its_prompt(self, max_tokens: int, engine: Engine) -> None:
        fed = 40 + max_tokens - 1
        given = request(*PROMPT, max_tokens=max_tokens)
        answer = self.run_and_keep(engine, given, Save(5, 0, fed), snapshot=3)
        turn = request(*PROMPT, *answer, 4, 2)
        begun = prefix(engine, (5, fed), snapshot=3)
        warm = self.run(engine, turn, chunk(engine, 0, 3, prefix=begun))
        engine.remove(0)
        assert warm == self.cold(engine, turn)

    def test_what_is_kept_includes_the_token_that_the_step_under_way_feeds(
        self, engine: Engine
    ) -> None:
        engine.add(0, request(*PROMPT))
        steps = [engine.step(prefill(0, 40)), engine.step(EMPTY), engine.step(EMPTY)]
        answer = tokens_of(steps, 0)
        assert len(answer) == 2
        engine.save_prefix(0, (Save(5, 0, 42),), 3 if engine.facts.stateful else None)
        engine.remove(0)
        turn = request(*PROMPT, *answer, 4, 2)
        begun = prefix(engine, (5, 42), snapshot=3)
        warm = self.run(engine, turn, chunk(engine, 0, 2, prefix=begun))
        engine.remove(0)
        assert warm == self.cold(engine, turn)

    def test_what_is_done_of_a_prompt_is_kept(self, engine: Engine) -> None:
        engine.add(0, request(*PROMPT))
        engine.step(prefill(0, 25))
        engine.save_prefix(0, (Save(5, 0, 25),), 3 if engine.facts.stateful else None)
        engine.remove(0)
        begun = prefix(engine, (5, 25), snapshot=3)
        warm = self.run(engine, request(*PROMPT), chunk(engine, 0, 15, prefix=begun))
        assert warm == self.cold_of_prompt(engine)

    def test_others_are_not_disturbed_by_what_is_kept_and_taken_over(self, engine: Engine) -> None:
        stays = request(*PROMPT[::-1], max_tokens=12)
        cold = self.cold(engine, stays)
        engine.add(1, stays)
        steps = [engine.step(prefill(1, 40))]
        engine.add(0, request(*PROMPT, max_tokens=3))
        saved = chunk(engine, 0, 40, saves=(Save(5, 0, 39),), snapshot=2)
        steps += [engine.step(StepPlan(prefill=(saved,))), engine.step(EMPTY), engine.step(EMPTY)]
        engine.save_prefix(0, (Save(6, 39, 42),), 3 if engine.facts.stateful else None)
        engine.remove(0)
        engine.add(2, request(*PROMPT, 1, 1))
        taken = chunk(engine, 2, 3, prefix=prefix(engine, (5, 39), snapshot=2))
        steps += [engine.step(StepPlan(prefill=(taken,))), *finish(engine)]
        assert tokens_of(steps, 1) == cold

    def test_what_is_forgotten_and_compacted_takes_nothing(self, engine: Engine) -> None:
        saved = chunk(engine, 0, 40, saves=(Save(5, 0, 20), Save(6, 20, 39)), snapshot=2)
        self.run(engine, request(*PROMPT), saved)
        engine.remove(0)
        self.run_and_keep(engine, request(*PROMPT), Save(7, 39, 45), snapshot=3)
        full = engine.held_nbytes
        engine.drop((6,), ())
        assert 0 < engine.held_nbytes < full
        engine.drop((5, 7, 99), (2, 3, 9) if engine.facts.stateful else ())
        engine.compact()
        assert engine.held_nbytes == 0
        assert engine.memory().used_tokens == 0

    def test_what_a_step_adds_was_foretold(self, engine: Engine) -> None:
        for slot in (0, 1):
            engine.add(slot, request(*PROMPT, max_tokens=60))
        before = engine.held_nbytes
        engine.step(whole(s0=request(*PROMPT), s1=request(*PROMPT)))
        assert engine.held_nbytes <= before + 2 * engine.row_nbytes(41)
        for _ in range(50):
            foretold = engine.held_nbytes + engine.growth_nbytes()
            engine.step(EMPTY)
            assert engine.held_nbytes <= foretold
