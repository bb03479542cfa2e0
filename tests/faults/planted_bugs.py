"""Bugs as they happen, each a patch of one function. The simulation has to find every one."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from mlx_dp.kvcache.prefix_cache import PrefixCache
from mlx_dp.kvcache.prefix_request import PrefixRequest
from mlx_dp.kvcache.request_slots import RequestSlots
from mlx_dp.orchestrator.control import recovery, request_desk, supervisor
from mlx_dp.orchestrator.control.answer_desk import AnswerDesk
from mlx_dp.orchestrator.control.dispatch import Dispatcher
from mlx_dp.orchestrator.control.fleet import Fleet
from mlx_dp.orchestrator.control.health_watch import HealthWatch
from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry
from mlx_dp.orchestrator.control.liveness import OwnLag
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.owner_facts import OwnerFacts
from mlx_dp.orchestrator.control.replay import after_loss
from mlx_dp.orchestrator.control.restart_budget import RestartBudget
from mlx_dp.orchestrator.control.supervisor_steps import Loss
from mlx_dp.orchestrator.control.worker_record import FailureDomain
from mlx_dp.orchestrator.service import Ended
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages import FinishReason, Rejected, RejectReason, TokenChunk
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduler import Scheduler

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def epochs_are_not_compared(patch: Patch) -> None:
    def lease(owner: Owner, request_id: int, epoch: int) -> Lease | None:
        return owner.leases.get(request_id)

    patch.setattr(Owner, "lease", lease)


def lost_incarnations_are_heard(patch: Patch) -> None:
    def index_of(fleet: Fleet, identity: str) -> int | None:
        return int(identity[1 : identity.index("-")])

    patch.setattr(Fleet, "index_of", index_of)


def a_slot_is_freed_twice(patch: Patch) -> None:
    free = RequestSlots.free

    def twice(slots: RequestSlots, slot: int) -> None:
        free(slots, slot)
        slots._idle.append(slot)

    patch.setattr(RequestSlots, "free", twice)


def the_last_token_is_sent_again(patch: Patch) -> None:
    """Those that arrive twice are told twice."""
    append = Ledger.append

    def always(
        ledger: Ledger, entry: RequestEntry, index: int, ids: tuple[int, ...], now: float
    ) -> bool:
        append(ledger, entry, index, ids, now)
        return True

    patch.setattr(Ledger, "append", always)


def replays_forget_the_last_token(patch: Patch) -> None:
    from mlx_dp.orchestrator.control import dispatch

    submit_of = dispatch._submit

    def shorter(entry: RequestEntry) -> Any:
        submit = submit_of(entry)
        return type(submit)(
            request_id=submit.request_id,
            epoch=submit.epoch,
            prompt_ids=submit.prompt_ids,
            output_ids=submit.output_ids[:-1],
            max_tokens=submit.max_tokens,
            stop_token_ids=submit.stop_token_ids,
            params=submit.params,
            cache_salt=submit.cache_salt,
            grammar=submit.grammar,
        )

    patch.setattr(dispatch, "_submit", shorter)


def gaps_are_filled_with_what_comes(patch: Patch) -> None:
    def append(
        ledger: Ledger, entry: RequestEntry, index: int, ids: tuple[int, ...], now: float
    ) -> bool:
        entry.emitted.extend(ids)
        entry.first_token_at = entry.first_token_at or now
        entry.last_token_at = now
        return True

    patch.setattr(Ledger, "append", append)


def a_prefix_stays_locked(patch: Patch) -> None:
    def let_go(cache: PrefixCache, request: PrefixRequest) -> None:
        request.reuse = request.leaf = None

    patch.setattr(PrefixCache, "_let_go", let_go)


def the_streak_is_never_reset(patch: Patch) -> None:
    patch.setattr(RestartBudget, "succeeded", lambda budget: None)


def the_restart_budget_is_endless(patch: Patch) -> None:
    patch.setattr(RestartBudget, "allow", lambda budget, now: True)


def what_cannot_start_is_started_again(patch: Patch) -> None:
    patch.setattr(recovery, "_is_final", lambda domain, loss: False)


def the_dead_get_requests(patch: Patch) -> None:
    patch.setattr(Owner, "takes_requests", property(lambda owner: True))


def nobody_waits_for_accepted(patch: Patch) -> None:
    patch.setattr(HealthWatch, "_ignored", lambda watch, owner, now: None)
    patch.setattr(HealthWatch, "unanswered", lambda watch, now: [])


def hangs_are_not_seen(patch: Patch) -> None:
    patch.setattr(HealthWatch, "_judge", lambda watch, owner, now: None)


def the_end_is_reported_twice(patch: Patch) -> None:
    end = WorkerLoop._end

    def twice(loop: WorkerLoop, slots: Any) -> None:
        requests = loop._scheduler.requests
        ends = [requests.at(slot) for slot in slots]
        end(loop, slots)
        for request in ends:
            loop._channel.send(request.finished)

    patch.setattr(WorkerLoop, "_end", twice)


def refusals_cost_a_worker(patch: Patch) -> None:
    rejected = OwnerFacts.rejected

    def blamed(facts: OwnerFacts, owner: Owner, fact: Rejected, now: float) -> None:
        rejected(facts, owner, fact, now)
        if fact.reason in (RejectReason.INVALID, RejectReason.TOO_LONG):
            raise ProtocolError(fact.message)

    patch.setattr(OwnerFacts, "rejected", blamed)


def an_abort_keeps_the_slot(patch: Patch) -> None:
    forget = Scheduler._forget

    def leaking(scheduler: Scheduler, request: Any) -> None:
        if request.finish is FinishReason.ABORT:
            scheduler.requests.remove(request)
            scheduler._room.row_left(request.request_id)
        else:
            forget(scheduler, request)

    patch.setattr(Scheduler, "_forget", leaking)


def what_was_left_keeps_its_lease(patch: Patch) -> None:
    finished = OwnerFacts.finished

    def keeping(facts: OwnerFacts, owner: Owner, fact: Any, now: float) -> None:
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None or facts.current(lease) is not None:
            finished(facts, owner, fact, now)

    patch.setattr(OwnerFacts, "finished", keeping)


def a_preemption_counts_as_an_attempt(patch: Patch) -> None:
    patch.setattr(Ledger, "preempt", Ledger.requeue)


def what_was_lost_is_not_replayed(patch: Patch) -> None:
    def fail(
        entry: RequestEntry, lease: Lease, loss: Loss, *, culprit: bool, max_attempts: int
    ) -> Ended:
        ended = after_loss(entry, lease, loss, culprit=culprit, max_attempts=max_attempts)
        return ended or Ended(reason=FinishReason.ERROR, code="worker_lost", status=502)

    patch.setattr(request_desk, "after_loss", fail)


def poison_goes_on_for_ever(patch: Patch) -> None:
    def replay(
        entry: RequestEntry, lease: Lease, loss: Loss, *, culprit: bool, max_attempts: int
    ) -> Ended | None:
        return after_loss(entry, lease, loss, culprit=False, max_attempts=max_attempts)

    patch.setattr(request_desk, "after_loss", replay)


def attempts_are_not_counted(patch: Patch) -> None:
    def accept(ledger: Ledger, entry: RequestEntry) -> None:
        before = entry.attempts
        original(ledger, entry)
        entry.attempts = before

    original = Ledger.accept
    patch.setattr(Ledger, "accept", accept)


def aborts_are_not_sent(patch: Patch) -> None:
    def silent(dispatcher: Dispatcher, owner: Owner, lease: Lease, now: float) -> bool:
        owner.abort_sent(lease, now)
        return True

    patch.setattr(Dispatcher, "_tell", silent)


def a_slot_is_free_before_its_owner_says_so(patch: Patch) -> None:
    def leave(owner: Owner, lease: Lease) -> None:
        owner.release(lease)

    patch.setattr(Owner, "leave", leave)


def our_own_sleep_is_held_against_others(patch: Patch) -> None:
    patch.setattr(OwnLag, "slept", lambda lag, now, interval_s: 0.0)


def the_old_process_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(FailureDomain, "gone", property(lambda domain: True))


def members_of_a_group_survive_each_other(patch: Patch) -> None:
    lose = supervisor.lose

    def only_the_culprit(worker: Any, loss: Any, limits: Any, *, culprit: bool, now: float) -> Any:
        return lose(worker, loss, limits, culprit=culprit, now=now) if culprit else []

    patch.setattr(supervisor, "lose", only_the_culprit)


def nobody_is_killed(patch: Patch) -> None:
    patch.setattr(supervisor, "due_kills", lambda workers, now: [])


def tokens_of_an_answer_go_missing_at_its_end(patch: Patch) -> None:
    tokens = AnswerDesk.tokens

    def but_the_last(
        desk: AnswerDesk, entry: RequestEntry, chunk: TokenChunk, *, before: float | None
    ) -> None:
        if len(entry.emitted) != entry.max_tokens or entry.epoch == 1:
            tokens(desk, entry, chunk, before=before)

    patch.setattr(AnswerDesk, "tokens", but_the_last)


PLANTED: Final[Mapping[str, Plant]] = {
    plant.__name__: plant
    for plant in (
        epochs_are_not_compared,
        lost_incarnations_are_heard,
        a_slot_is_freed_twice,
        the_last_token_is_sent_again,
        replays_forget_the_last_token,
        gaps_are_filled_with_what_comes,
        a_prefix_stays_locked,
        the_streak_is_never_reset,
        the_restart_budget_is_endless,
        what_cannot_start_is_started_again,
        the_dead_get_requests,
        nobody_waits_for_accepted,
        hangs_are_not_seen,
        the_end_is_reported_twice,
        refusals_cost_a_worker,
        an_abort_keeps_the_slot,
        what_was_left_keeps_its_lease,
        a_preemption_counts_as_an_attempt,
        what_was_lost_is_not_replayed,
        poison_goes_on_for_ever,
        attempts_are_not_counted,
        aborts_are_not_sent,
        a_slot_is_free_before_its_owner_says_so,
        our_own_sleep_is_held_against_others,
        the_old_process_is_not_waited_for,
        members_of_a_group_survive_each_other,
        nobody_is_killed,
        tokens_of_an_answer_go_missing_at_its_end,
    )
}
