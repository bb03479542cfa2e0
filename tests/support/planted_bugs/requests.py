"""Bugs of the request table, of messages and of response streams."""

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from mlx_dp.orchestrator.api import Ended
from mlx_dp.orchestrator.control.requests import lifecycle
from mlx_dp.orchestrator.control.requests.correlated_crashes import CorrelatedCrashes
from mlx_dp.orchestrator.control.requests.dispatch import Dispatcher
from mlx_dp.orchestrator.control.requests.replay import count_loss
from mlx_dp.orchestrator.control.requests.response_stream import OpenStreams
from mlx_dp.orchestrator.control.requests.worker_events import WorkerEvents
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Hold, Owner
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.state.request_queue import RequestQueue
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.orchestrator.control.workers.actions import Loss
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import FinishReason, Rejected, RejectReason, TokenChunk

Patch = pytest.MonkeyPatch


def epochs_are_not_compared(patch: Patch) -> None:
    def grant(owner: Owner, request_id: int, epoch: int) -> Grant | None:
        return owner.grants.get(request_id)

    patch.setattr(Owner, "grant_of", grant)


def the_last_token_is_sent_again(patch: Patch) -> None:
    """Messages that arrive twice are handled twice."""
    append = RequestTable.append

    def always(
        table: RequestTable, entry: RequestEntry, index: int, ids: tuple[int, ...], now: float
    ) -> bool:
        append(table, entry, index, ids, now)
        return True

    patch.setattr(RequestTable, "append", always)


def replays_forget_the_last_token(patch: Patch) -> None:
    from mlx_dp.orchestrator.control.requests import dispatch

    submit_of = dispatch._submit

    def shorter(entry: RequestEntry, max_tokens: int) -> Any:
        submit = submit_of(entry, max_tokens)
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
        table: RequestTable, entry: RequestEntry, index: int, ids: tuple[int, ...], now: float
    ) -> bool:
        entry.emitted.extend(ids)
        entry.first_token_at = entry.first_token_at or now
        entry.last_token_at = now
        return True

    patch.setattr(RequestTable, "append", append)


def the_dead_get_requests(patch: Patch) -> None:
    def takes_requests(owner: Owner) -> bool:
        return not owner.holds - {Hold.CLOSED}

    patch.setattr(Owner, "takes_requests", property(takes_requests))


def refusals_cost_a_worker(patch: Patch) -> None:
    rejected = WorkerEvents.on_rejected

    def blamed(events: WorkerEvents, owner: Owner, event: Rejected, now: float) -> None:
        rejected(events, owner, event, now)
        if event.reason in (RejectReason.INVALID, RejectReason.TOO_LONG):
            raise ProtocolError(event.message)

    patch.setattr(WorkerEvents, "on_rejected", blamed)


def what_was_left_keeps_its_lease(patch: Patch) -> None:
    finished = WorkerEvents.on_finished

    def keeping(events: WorkerEvents, owner: Owner, event: Any, now: float) -> None:
        grant = owner.grant_of(event.request_id, event.epoch)
        if grant is None or events._table.current(grant) is not None:
            finished(events, owner, event, now)

    patch.setattr(WorkerEvents, "on_finished", keeping)


def bystanders_are_blamed(patch: Patch) -> None:
    patch.setattr(lifecycle, "find_sole_suspect", lambda grants: None)


def accidents_are_laid_to_requests(patch: Patch) -> None:
    patch.setattr(CorrelatedCrashes, "exonerates", lambda deaths, request_id: False)


def suspects_are_tried_together(patch: Patch) -> None:
    patch.setattr(Owner, "runs_sole_suspect", property(lambda owner: False))


def what_was_lost_is_not_replayed(patch: Patch) -> None:
    def fail(
        entry: RequestEntry, grant: Grant, loss: Loss, *, culprit: bool, max_attempts: int
    ) -> Ended:
        ended = count_loss(entry, grant, loss, culprit=culprit, max_attempts=max_attempts)
        return ended or Ended(reason=FinishReason.ERROR, code="worker_lost", status=502)

    patch.setattr(lifecycle, "count_loss", fail)


def poison_goes_on_for_ever(patch: Patch) -> None:
    def replay(
        entry: RequestEntry, grant: Grant, loss: Loss, *, culprit: bool, max_attempts: int
    ) -> Ended | None:
        return count_loss(entry, grant, loss, culprit=False, max_attempts=max_attempts)

    patch.setattr(lifecycle, "count_loss", replay)


def attempts_are_not_counted(patch: Patch) -> None:
    def replay(
        entry: RequestEntry, grant: Grant, loss: Loss, *, culprit: bool, max_attempts: int
    ) -> Ended | None:
        return count_loss(entry, grant, loss, culprit=culprit, max_attempts=10**9)

    patch.setattr(lifecycle, "count_loss", replay)


def aborts_are_not_sent(patch: Patch) -> None:
    def silent(dispatcher: Dispatcher, owner: Owner, grant: Grant, now: float) -> bool:
        owner.note_abort_sent(grant, now)
        return True

    patch.setattr(Dispatcher, "_send_abort", silent)


def a_slot_is_free_before_its_owner_says_so(patch: Patch) -> None:
    def leave(owner: Owner, grant: Grant) -> None:
        owner.release(grant)

    patch.setattr(Owner, "start_abort", leave)


def tokens_of_an_answer_go_missing_at_its_end(patch: Patch) -> None:
    tokens = OpenStreams.tokens

    def but_the_last(
        streams: OpenStreams, entry: RequestEntry, chunk: TokenChunk, *, before: float | None
    ) -> None:
        if len(entry.emitted) != entry.max_tokens or entry.epoch == 1:
            tokens(streams, entry, chunk, before=before)

    patch.setattr(OpenStreams, "tokens", but_the_last)


def replays_keep_their_epoch(patch: Patch) -> None:
    requeue = RequestTable.requeue

    def unfenced(table: RequestTable, entry: RequestEntry, now: float) -> None:
        requeue(table, entry, now)
        entry.epoch -= 1

    patch.setattr(RequestTable, "requeue", unfenced)


def replays_are_held_back(patch: Patch) -> None:
    """For some seconds, in which the queue is asked a hundred times."""
    heads = RequestQueue.heads
    asked: WeakKeyDictionary[RequestQueue, Counter[int]] = WeakKeyDictionary()

    def late(queue: RequestQueue) -> list[RequestEntry]:
        counts = asked.setdefault(queue, Counter())
        found = heads(queue)
        counts.update(entry.request_id for entry in found if entry.crashes)
        return [entry for entry in found if not 0 < counts[entry.request_id] < 100]

    patch.setattr(RequestQueue, "heads", late)


def the_queue_is_endless(patch: Patch) -> None:
    patch.setattr(RequestQueue, "full", property(lambda queue: False))


def the_queue_is_shorter_than_it_is_said_to_be(patch: Patch) -> None:
    patch.setattr(RequestQueue, "full", property(lambda queue: len(queue) >= queue._limit - 1))


def replays_count_their_cached_prefix_again(patch: Patch) -> None:
    """And therefore more than the first owner had."""

    def prefilled(table: RequestTable, entry: RequestEntry, cached_tokens: int) -> bool:
        first = entry.cached_tokens is None
        entry.cached_tokens = min(cached_tokens, len(entry.generation.prompt_ids))
        return first or entry.epoch > 1

    patch.setattr(RequestTable, "note_prefilled", prefilled)


def nothing_is_said_to_be_cached(patch: Patch) -> None:
    def prefilled(table: RequestTable, entry: RequestEntry, cached_tokens: int) -> bool:
        first = entry.cached_tokens is None
        entry.cached_tokens = 0
        return first

    patch.setattr(RequestTable, "note_prefilled", prefilled)
