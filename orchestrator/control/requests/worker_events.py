"""Worker events: applies the events of owners about their requests and prefix caches."""

from typing import Final, assert_never

from mlx_dp.orchestrator.api import Ended
from mlx_dp.orchestrator.control.requests.cache_flush import CacheFlushes
from mlx_dp.orchestrator.control.requests.dispatch import Dispatcher
from mlx_dp.orchestrator.control.requests.replay import completion_of
from mlx_dp.orchestrator.control.requests.response_stream import OpenStreams
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Hold, Owner
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.state.request_table import RequestTable, failed
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import (
    Accepted,
    Finished,
    FinishReason,
    Flushed,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
)


class WorkerEvents:
    """Applies one event at a time. Raises ProtocolError for an event that its grant rules out.

    Every event is checked against its grant, so that events of an earlier epoch change nothing. A
    request that ended early leaves its grant behind, until the owner gives the slot back.
    """

    def __init__(
        self,
        table: RequestTable,
        dispatcher: Dispatcher,
        streams: OpenStreams,
        flushes: CacheFlushes,
        counters: Counters,
    ) -> None:
        self._table: Final = table
        self._dispatcher: Final = dispatcher
        self._streams: Final = streams
        self._flushes: Final = flushes
        self._counters: Final = counters

    def on_accepted(self, owner: Owner, event: Accepted) -> None:
        grant = owner.grant_of(event.request_id, event.epoch)
        if grant is None or grant.accepted:
            self._counters.stale_events += 1
            return
        owner.note_accepted(grant)
        entry = self._table.current(grant)
        if entry is not None:
            self._table.accept(entry)

    def on_rejected(self, owner: Owner, event: Rejected, now: float) -> None:
        grant = owner.grant_of(event.request_id, event.epoch)
        if grant is None:
            self._counters.stale_events += 1
            return
        if grant.accepted:
            raise ProtocolError(f"request {event.request_id}: rejected after it was accepted")
        entry = self._table.current(grant)
        if entry is None:
            owner.release(grant)
            return
        match event.reason:
            case RejectReason.NO_SLOT | RejectReason.NO_TOKENS | RejectReason.DRAINING:
                self._dispatcher.requeue_unserved(owner, grant, entry, now)
                if event.reason is RejectReason.DRAINING:
                    owner.holds.add(Hold.CLOSED)
            case RejectReason.TOO_LONG | RejectReason.INVALID:
                owner.release(grant)
                ended = failed(event.message, f"rejected_{event.reason.value}", 400)
                self._table.finish(entry, ended, now)
            case _:
                assert_never(event.reason)

    def on_prefilled(self, owner: Owner, event: Prefilled) -> None:
        grant = owner.grant_of(event.request_id, event.epoch)
        if grant is None or grant.prefilled:
            self._counters.stale_events += 1
            return
        if not grant.accepted:
            raise ProtocolError(f"request {event.request_id}: prefilled before it was accepted")
        owner.note_prefilled(grant)
        entry = self._table.current(grant)
        if entry is not None and self._table.note_prefilled(entry, event.cached_tokens):
            self._streams.started(entry, owner.dp_rank)

    def on_tokens(self, owner: Owner, event: Tokens, now: float) -> None:
        for chunk in event.chunks:
            grant = owner.grants.get(chunk.request_id)
            if grant is None or grant.epoch != chunk.epoch:
                self._counters.stale_events += 1
                continue
            entry = self._table.current(grant)
            if entry is not None:
                self._extend(owner, grant, entry, chunk, now)

    def _extend(
        self, owner: Owner, grant: Grant, entry: RequestEntry, chunk: TokenChunk, now: float
    ) -> None:
        if not grant.prefilled:
            raise ProtocolError(f"request {chunk.request_id}: tokens before it was prefilled")
        before = entry.last_token_at
        if self._table.append(entry, chunk.index, chunk.ids, now):
            owner.note_tokens(grant, len(chunk.ids))
            self._counters.generated_by_owner[owner.dp_rank] += len(chunk.ids)
            self._streams.tokens(entry, chunk, before=before)
        else:
            self._counters.duplicate_chunks += 1

    def on_preempted(self, owner: Owner, event: Preempted, now: float) -> None:
        grant = self._final_grant(owner, event)
        if grant is None:
            return
        self._counters.preempted_by_owner[owner.dp_rank] += 1
        entry = self._table.current(grant)
        ended = None if entry is None else completion_of(entry)
        if entry is None:
            owner.release_unserved(grant)
        elif ended is not None:
            self._dispatcher.release(owner, grant, entry)
            self._table.finish(entry, ended, now)
        else:
            self._dispatcher.requeue_unserved(owner, grant, entry, now)

    def on_finished(self, owner: Owner, event: Finished, now: float) -> None:
        grant = self._final_grant(owner, event)
        if grant is None:
            return
        entry = self._table.current(grant)
        if entry is None:
            owner.release(grant)
            return
        self._dispatcher.release(owner, grant, entry)
        self._table.finish(entry, _ended(event), now)

    def on_flushed(self, owner: Owner, event: Flushed) -> None:
        self._dispatcher.forget_prefixes(owner)
        if not self._flushes.on_flushed(owner.dp_rank, event):
            self._counters.stale_events += 1

    def _final_grant(self, owner: Owner, event: Finished | Preempted) -> Grant | None:
        """Return the grant that a final event ends, or None if the event is stale.

        Raises ProtocolError if tokens are missing.
        """
        grant = owner.grant_of(event.request_id, event.epoch)
        if grant is None:
            self._counters.stale_events += 1
            return None
        if not grant.accepted:
            raise ProtocolError(f"request {event.request_id}: {event.tag} before it was accepted")
        entry = self._table.current(grant)
        if entry is not None and event.num_tokens != len(entry.emitted):
            raise ProtocolError(
                f"request {event.request_id}: {event.tag} with {event.num_tokens} tokens, of "
                f"which {len(entry.emitted)} arrived"
            )
        return grant


def _ended(event: Finished) -> Ended:
    match event.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return Ended(reason=event.reason)
        case FinishReason.ABORT:
            # A request that we abort leaves the table at once, so this abort was not ours.
            return failed("the worker aborted the request by itself", "worker_aborted", 500)
        case FinishReason.ERROR:
            return failed(event.message, "engine_error", 500)
        case _:
            assert_never(event.reason)
