import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.request_limits import NEXT_ANSWER_TOKENS
from mlx_dp.proto.messages.commands import Abort, FakeEngineOptions, Submit
from mlx_dp.proto.messages.events import (
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    TokenLogprob,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import Drawn, PrefillChunk
from mlx_dp.worker.fake.engine import KV_BYTES_PER_TOKEN, FakeEngine
from mlx_dp.worker.scheduling.running_request import RunningRequest
from mlx_dp.worker.scheduling.scheduler import Scheduler

VOCAB_SIZE = 100
CONTEXT_LENGTH = 64


def scheduler(
    *,
    slots: int = 2,
    pool: int | None = 200,
    budget: int | None = None,
    hybrid: bool = False,
    context_length: int = CONTEXT_LENGTH,
) -> Scheduler:
    """An owner without the prefix cache. ``budget`` is in tokens of KV."""
    options = FakeEngineOptions(
        vocab_size=VOCAB_SIZE, context_length=context_length, pool_tokens=pool, hybrid=hybrid
    )
    engine = FakeEngine(options, clock=lambda: 0.0, sleep=lambda _: None)
    capacity = OwnerCapacity(
        request_slots=slots,
        auxiliary_slots=slots if hybrid else 0,
        pool_tokens=pool,
        cache_nbytes=None if budget is None else budget * KV_BYTES_PER_TOKEN,
    )
    engine.open(capacity)
    return Scheduler(capacity, engine, context_length)


def submit(
    request_id: int,
    *,
    epoch: int = 1,
    prompt: int = 3,
    output_ids: tuple[int, ...] = (),
    max_tokens: int = 4,
    stop: tuple[int, ...] = (),
    params: SamplingParams | None = None,
) -> Submit:
    return Submit(
        request_id=request_id,
        epoch=epoch,
        prompt_ids=(5,) * prompt,
        output_ids=output_ids,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        params=params or SamplingParams(),
    )


def admit(to: Scheduler, request: Submit) -> int:
    admitted = to.submit(request)
    assert isinstance(admitted, RunningRequest), admitted
    return admitted.lease.slot


def refuse(to: Scheduler, request: Submit) -> Rejected:
    before = (len(to.requests), to.requests.reserved_tokens, to.auxiliary_used)
    refused = to.submit(request)
    assert isinstance(refused, Rejected), refused
    assert (refused.request_id, refused.epoch) == (request.request_id, request.epoch)
    assert (len(to.requests), to.requests.reserved_tokens, to.auxiliary_used) == before
    return refused


def end(owner: Scheduler, slot: int) -> Finished:
    """Like the loop, without the engine."""
    assert owner.take_saves(slot) is None
    return owner.release(slot)


def draw(slot: int, token: int = 7) -> tuple[Drawn, ...]:
    return (Drawn(slot=slot, token=token),)


def test_a_request_gets_a_slot_a_state_and_what_it_needs_next() -> None:
    owner = scheduler(hybrid=True)
    assert admit(owner, submit(1, prompt=10, max_tokens=5)) == 0
    assert len(owner.requests) == 1
    assert owner.requests.reserved_tokens == 14
    assert owner.auxiliary_used == 1


def test_of_a_long_answer_only_the_next_tokens_are_set_aside() -> None:
    owner = scheduler(context_length=2_000, pool=2_000)
    admit(owner, submit(1, prompt=10, max_tokens=1_000))
    assert owner.requests.reserved_tokens == 10 + NEXT_ANSWER_TOKENS - 1


def test_refusals_by_load_say_what_is_short() -> None:
    owner = scheduler(slots=2, pool=50, budget=50)
    admit(owner, submit(1, prompt=20, max_tokens=20))
    refused = refuse(owner, submit(2, prompt=10, max_tokens=10))
    assert refused.reason is RejectReason.NO_TOKENS
    assert refused.message == "the next 19 KV tokens take 19456 bytes, which are not free"
    admit(owner, submit(2, prompt=6, max_tokens=6))
    assert refuse(owner, submit(3)).reason is RejectReason.NO_SLOT


def test_what_runs_alone_is_taken_whatever_it_takes() -> None:
    owner = scheduler(slots=2, pool=50, budget=10)
    admit(owner, submit(1, prompt=20, max_tokens=20))
    assert owner.victim() is None
    assert refuse(owner, submit(2)).reason is RejectReason.NO_TOKENS


def test_what_can_never_fit_is_too_long_rather_than_short_of_tokens() -> None:
    too_long = refuse(scheduler(), submit(1, prompt=60, max_tokens=5)).message
    assert "maximum context length is 64 tokens" in too_long
    assert "(60 in the messages, 5 in the completion)" in too_long
    refused = refuse(scheduler(pool=30), submit(1, prompt=28, max_tokens=4))
    assert refused.reason is RejectReason.TOO_LONG
    assert "30 KV tokens" in refused.message


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Submit(request_id=1, epoch=1, prompt_ids=(1, 100), max_tokens=2), "prompt_ids"),
        (submit(1, output_ids=(100,)), "output_ids"),
        (submit(1, params=SamplingParams(logit_bias=((100, 1.0),))), "logit_bias"),
    ],
)
def test_token_ids_beyond_the_vocabulary_come_no_further(request_: Submit, field: str) -> None:
    refused = refuse(scheduler(), request_)
    assert refused.reason is RejectReason.INVALID
    assert refused.message == f"{field}: token id 100 is outside of the vocabulary of 100"


def test_the_largest_token_id_is_fine() -> None:
    admit(scheduler(), submit(1, output_ids=(99,), stop=(99 - 1,)))


def test_a_stop_token_that_the_model_cannot_draw_is_harmless() -> None:
    # Some models name an end token beyond the width of their logits.
    owner = scheduler()
    slot = admit(owner, submit(1, max_tokens=2, stop=(100, 2**31 - 1)))
    owner.plan(100)
    assert owner.absorb(draw(slot)).finished_slots == ()
    assert owner.absorb(draw(slot)).finished_slots == (slot,)
    assert end(owner, slot).reason is FinishReason.LENGTH


def test_a_request_that_runs_here_is_not_taken_twice_and_may_come_back_later() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, max_tokens=1))
    refused = refuse(owner, submit(1, epoch=2))
    assert refused.reason is RejectReason.INVALID
    assert refused.message == "request 1 runs here already, with epoch 1"
    owner.plan(100)
    owner.absorb(draw(slot))
    end(owner, slot)
    admit(owner, submit(1, epoch=2))


@pytest.mark.parametrize(
    ("replayed", "why"),
    [
        (submit(1, output_ids=(7, 7), max_tokens=2), "leave nothing to generate"),
        (submit(1, output_ids=(7, 9), stop=(9,)), "the answer is complete"),
    ],
)
def test_an_answer_that_is_complete_is_not_continued(replayed: Submit, why: str) -> None:
    refused = refuse(scheduler(), replayed)
    assert refused.reason is RejectReason.INVALID
    assert why in refused.message


def test_a_draining_owner_finishes_what_runs_and_takes_nothing() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, max_tokens=1))
    owner.drain()
    assert refuse(owner, submit(2)).reason is RejectReason.DRAINING
    owner.plan(100)
    assert owner.absorb(draw(slot)).finished_slots == (slot,)
    assert end(owner, slot).reason is FinishReason.LENGTH


def test_prompts_are_prefilled_first_come_first_served_within_the_budget() -> None:
    owner = scheduler(slots=3)
    for number, prompt in enumerate((10, 3, 8)):
        admit(owner, submit(number, prompt=prompt))
    assert owner.requests.waiting == 3
    assert owner.plan(6).prefill == (PrefillChunk(slot=0, num_tokens=6),)
    assert owner.plan(9).prefill == (
        PrefillChunk(slot=0, num_tokens=4),
        PrefillChunk(slot=1, num_tokens=3),
        PrefillChunk(slot=2, num_tokens=2),
    )
    assert (owner.requests.waiting, owner.requests.decoding) == (1, 2)
    assert owner.plan(100).prefill == (PrefillChunk(slot=2, num_tokens=6),)
    assert owner.plan(100).prefill == ()


def test_nothing_shares_a_step_with_the_end_of_a_long_prompt_while_others_decode() -> None:
    owner = scheduler(slots=4, context_length=200)
    for number, prompt in enumerate((3, 100, 5)):
        admit(owner, submit(number, prompt=prompt, max_tokens=9))
    assert owner.plan(90).prefill == (
        PrefillChunk(slot=0, num_tokens=3),
        PrefillChunk(slot=1, num_tokens=87),
    )
    assert owner.plan(9).prefill == (PrefillChunk(slot=1, num_tokens=9),)
    # All but the token that no chunk runs, so that the end is not a pass as well.
    assert owner.plan(4).prefill == (
        PrefillChunk(slot=1, num_tokens=3),
        PrefillChunk(slot=2, num_tokens=1),
    )
    assert owner.plan(90).prefill == (PrefillChunk(slot=1, num_tokens=1),)
    assert owner.plan(90).prefill == (PrefillChunk(slot=2, num_tokens=4),)


def test_where_nothing_decodes_the_end_of_a_long_prompt_has_company() -> None:
    owner = scheduler(slots=4, context_length=200)
    for number, prompt in enumerate((100, 5)):
        admit(owner, submit(number, prompt=prompt, max_tokens=9))
    assert [chunk.slot for chunk in owner.plan(200).prefill] == [0, 1]


def test_a_replayed_answer_is_prefilled_behind_its_prompt_and_counts() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, prompt=3, output_ids=(7, 8), max_tokens=4))
    assert owner.requests.reserved_tokens == 6
    assert owner.plan(100).prefill == (PrefillChunk(slot=slot, num_tokens=5),)
    outcome = owner.absorb(draw(slot, 9))
    assert outcome.tokens is not None
    assert outcome.tokens.chunks[0].index == 2
    assert outcome.tokens.chunks[0].ids == (9,)
    assert owner.absorb(draw(slot, 9)).finished_slots == (slot,)
    assert end(owner, slot).num_tokens == 4


def test_a_row_whose_last_token_is_under_way_does_not_decode() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, prompt=3, max_tokens=2))
    owner.plan(100)
    assert owner.requests.decoding == 1
    owner.plan(100)
    assert owner.requests.decoding == 0
    owner.absorb(draw(slot))
    assert len(owner.requests) == 1


def test_a_step_yields_one_frame_for_all_its_requests_in_their_order() -> None:
    owner = scheduler()
    admit(owner, submit(11, max_tokens=1))
    admit(owner, submit(22, stop=(9,)))
    owner.plan(100)
    logprob = TokenLogprob(logprob=-0.5)
    outcome = owner.absorb((Drawn(slot=0, token=7, logprob=logprob), Drawn(slot=1, token=8)))
    assert outcome.tokens is not None
    first, second = outcome.tokens.chunks
    assert (first.request_id, first.epoch, first.index, first.ids) == (11, 1, 0, (7,))
    assert (first.logprobs, second.logprobs) == ((logprob,), ())
    assert second.request_id == 22
    assert outcome.finished_slots == (0,)


def test_a_stop_token_is_sent_counts_and_ends_the_answer() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, max_tokens=9, stop=(9,)))
    owner.plan(100)
    assert owner.absorb(draw(slot, 8)).finished_slots == ()
    outcome = owner.absorb(draw(slot, 9))
    assert outcome.tokens is not None
    assert outcome.tokens.chunks[0].ids == (9,)
    assert outcome.finished_slots == (slot,)
    assert end(owner, slot) == Finished(
        request_id=1, epoch=1, reason=FinishReason.STOP, num_tokens=2
    )


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, max_tokens=1, stop=(9,)))
    owner.plan(100)
    owner.absorb(draw(slot, 9))
    assert end(owner, slot).reason is FinishReason.STOP


def test_a_report_of_the_end_exists_only_once_all_is_free() -> None:
    owner = scheduler(slots=1, hybrid=True)
    slot = admit(owner, submit(1, max_tokens=1))
    owner.plan(100)
    owner.absorb(draw(slot))
    assert refuse(owner, submit(2)).reason is RejectReason.NO_SLOT
    end(owner, slot)
    assert (len(owner.requests), owner.requests.reserved_tokens, owner.auxiliary_used) == (0, 0, 0)
    with pytest.raises(KeyError):
        end(owner, slot)


def test_a_request_that_has_not_finished_is_not_released() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1))
    with pytest.raises(AssertionError, match="request 1 has not ended"):
        end(owner, slot)


def test_an_abort_frees_the_slot_in_every_state_and_is_idempotent() -> None:
    owner = scheduler(slots=3)
    for number in (1, 2, 3):
        admit(owner, submit(number))
    owner.plan(4)
    owner.launched()
    owner.absorb(draw(0))
    for number, num_tokens in ((3, 0), (2, 0), (1, 1)):
        slot = owner.abort(Abort(request_id=number, epoch=1))
        assert slot is not None
        finished = end(owner, slot)
        assert (finished.request_id, finished.reason) == (number, FinishReason.ABORT)
        assert finished.num_tokens == num_tokens
        assert owner.abort(Abort(request_id=number, epoch=1)) is None
    owner.check()
    assert owner.requests.reserved_tokens == 0


def test_an_abort_of_an_unknown_request_or_an_older_grant_does_nothing() -> None:
    owner = scheduler()
    admit(owner, submit(1, epoch=5))
    assert owner.abort(Abort(request_id=2, epoch=5)) is None
    assert owner.abort(Abort(request_id=1, epoch=4)) is None
    assert len(owner.requests) == 1


def test_an_abort_of_a_newer_grant_ends_the_stale_one() -> None:
    owner = scheduler()
    slot = admit(owner, submit(1, epoch=5))
    assert owner.abort(Abort(request_id=1, epoch=6)) == slot
    assert end(owner, slot).epoch == 5


class SchedulerMachine(RuleBasedStateMachine):
    """Under any events, all counts are consistent and every request ends exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = scheduler(slots=3, pool=120, hybrid=True)
        self.slots: dict[int, Submit] = {}
        self.drawn: dict[int, int] = {}
        self.unfilled: dict[int, int] = {}
        self.next_request = 0

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 5), replayed=st.integers(0, 3))
    def submit(self, prompt: int, max_tokens: int, replayed: int) -> None:
        self.next_request += 1
        request = submit(
            self.next_request, prompt=prompt, max_tokens=max_tokens, output_ids=(6,) * replayed
        )
        admitted = self.owner.submit(request)
        if isinstance(admitted, RunningRequest):
            slot = admitted.lease.slot
            assert slot not in self.slots
            self.slots[slot] = request
            self.drawn[slot] = replayed
            self.unfilled[slot] = prompt + replayed

    @rule(budget=st.integers(1, 20))
    def step(self, budget: int) -> None:
        decoding = [slot for slot, unfilled in self.unfilled.items() if not unfilled]
        plan = self.owner.plan(budget)
        self.owner.launched()
        assert sum(chunk.num_tokens for chunk in plan.prefill) <= budget
        for chunk in plan.prefill:
            self.unfilled[chunk.slot] -= chunk.num_tokens
            assert self.unfilled[chunk.slot] >= 0
        drawn = [slot for slot in self.slots if slot in decoding or not self.unfilled[slot]]
        outcome = self.owner.absorb(tuple(Drawn(slot=slot, token=7) for slot in drawn))
        assert (outcome.tokens is None) == (not drawn)
        for slot in drawn:
            self.drawn[slot] += 1
        ended = {slot for slot in drawn if self.drawn[slot] == self.slots[slot].max_tokens}
        assert set(outcome.finished_slots) == ended
        for slot in outcome.finished_slots:
            self.end(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        abort = Abort(request_id=self.slots[slot].request_id, epoch=1)
        assert self.owner.abort(abort) == slot
        self.end(slot)
        assert self.owner.abort(abort) is None

    def end(self, slot: int) -> None:
        finished = end(self.owner, slot)
        assert finished.request_id == self.slots.pop(slot).request_id
        assert finished.num_tokens == self.drawn.pop(slot)
        del self.unfilled[slot]

    @invariant()
    def counts_agree(self) -> None:
        self.owner.check()
        assert len(self.owner.requests) == len(self.slots) == self.owner.auxiliary_used
        waiting = sum(unfilled > 0 for unfilled in self.unfilled.values())
        assert self.owner.requests.waiting == waiting
        assert self.owner.requests.reserved_tokens == sum(
            len(request.prompt_ids) + request.max_tokens - 1 for request in self.slots.values()
        )


TestScheduler = SchedulerMachine.TestCase
