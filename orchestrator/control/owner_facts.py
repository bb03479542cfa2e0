"""What owners say of the requests that they were granted, and what becomes of those."""

from typing import Final, assert_never

from mlx_dp.orchestrator.control.answer_desk import AnswerDesk
from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.dispatch import Dispatcher
from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.replay import complete
from mlx_dp.orchestrator.control.request_ends import RequestEnds, error
from mlx_dp.orchestrator.service import Ended
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages import (
    Accepted,
    Finished,
    FinishReason,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
)


class OwnerFacts:
    """Takes in one fact at a time. Those that cannot be raise ProtocolError.

    Every fact is checked against the lease of its grant, so that what an owner says of an earlier
    epoch changes nothing. A request that ended early leaves its lease behind, until the owner
    gives the slot back.
    """

    def __init__(
        self,
        ledger: Ledger,
        answers: AnswerDesk,
        tally: Tally,
        dispatcher: Dispatcher,
        ends: RequestEnds,
    ) -> None:
        self._ledger: Final = ledger
        self._answers: Final = answers
        self._tally: Final = tally
        self._dispatcher: Final = dispatcher
        self._ends: Final = ends

    def accepted(self, owner: Owner, fact: Accepted) -> None:
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None or lease.accepted:
            self._tally.stale_facts += 1
            return
        owner.accepted(lease)
        entry = self.current(lease)
        if entry is not None:
            self._ledger.accept(entry)

    def rejected(self, owner: Owner, fact: Rejected, now: float) -> None:
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None:
            self._tally.stale_facts += 1
            return
        if lease.accepted:
            raise ProtocolError(f"request {fact.request_id}: rejected after it was accepted")
        entry = self.current(lease)
        if entry is None:
            owner.release(lease)
            return
        match fact.reason:
            case RejectReason.NO_SLOT | RejectReason.NO_TOKENS | RejectReason.DRAINING:
                self._dispatcher.take_back(owner, lease, entry)
                owner.closed |= fact.reason is RejectReason.DRAINING
                self._ends.queued_again(entry, now)
            case RejectReason.TOO_LONG | RejectReason.INVALID:
                owner.release(lease)
                self._ends.end(
                    entry, error(fact.message, f"rejected_{fact.reason.value}", 400), now
                )
            case _:
                assert_never(fact.reason)

    def prefilled(self, owner: Owner, fact: Prefilled) -> None:
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None or lease.prefilled:
            self._tally.stale_facts += 1
            return
        if not lease.accepted:
            raise ProtocolError(f"request {fact.request_id}: prefilled before it was accepted")
        owner.prefilled(lease)
        entry = self.current(lease)
        if entry is not None and self._ledger.prefilled(entry, fact.cached_tokens):
            self._answers.started(entry, owner.index)

    def tokens(self, owner: Owner, fact: Tokens, now: float) -> None:
        for chunk in fact.chunks:
            lease = owner.leases.get(chunk.request_id)
            if lease is None or lease.epoch != chunk.epoch:
                self._tally.stale_facts += 1
                continue
            entry = self.current(lease)
            if entry is not None:
                self._extend(owner, lease, entry, chunk, now)

    def _extend(
        self, owner: Owner, lease: Lease, entry: RequestEntry, chunk: TokenChunk, now: float
    ) -> None:
        if not lease.prefilled:
            raise ProtocolError(f"request {chunk.request_id}: tokens before it was prefilled")
        before = entry.last_token_at
        if self._ledger.append(entry, chunk.index, chunk.ids, now):
            owner.yielded(lease, len(chunk.ids))
            self._tally.generated_by_owner[owner.index] += len(chunk.ids)
            self._answers.tokens(entry, chunk, before=before)
        else:
            self._tally.duplicate_chunks += 1

    def preempted(self, owner: Owner, fact: Preempted, now: float) -> None:
        lease = self._leaves(owner, fact)
        if lease is None:
            return
        self._tally.preempted_by_owner[owner.index] += 1
        entry = self.current(lease)
        ended = None if entry is None else complete(entry)
        if entry is None:
            owner.ran_short(lease)
        elif ended is not None:
            self._dispatcher.finished(owner, lease, entry)
            self._ends.end(entry, ended, now)
        else:
            self._dispatcher.preempted(owner, lease, entry)
            self._ends.queued_again(entry, now)

    def finished(self, owner: Owner, fact: Finished, now: float) -> None:
        lease = self._leaves(owner, fact)
        if lease is None:
            return
        entry = self.current(lease)
        if entry is None:
            owner.release(lease)
            return
        self._dispatcher.finished(owner, lease, entry)
        self._ends.end(entry, _ended(fact), now)

    def _leaves(self, owner: Owner, fact: Finished | Preempted) -> Lease | None:
        """The lease that an owner gives back with all tokens told, or None if it has gone."""
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None:
            self._tally.stale_facts += 1
            return None
        if not lease.accepted:
            raise ProtocolError(f"request {fact.request_id}: {fact.tag} before it was accepted")
        entry = self.current(lease)
        if entry is not None and fact.num_tokens != len(entry.emitted):
            raise ProtocolError(
                f"request {fact.request_id}: {fact.tag} with {fact.num_tokens} tokens, of which "
                f"{len(entry.emitted)} arrived"
            )
        return lease

    def current(self, lease: Lease) -> RequestEntry | None:
        """The request that this lease is for, unless it has ended or moved on."""
        if lease.withdrawn:
            return None
        entry = self._ledger.get(lease.request_id)
        # Otherwise a request moves on only after its lease is gone, so that no slot has two owners.
        assert entry is None or entry.epoch == lease.epoch, (lease.request_id, lease.epoch)
        return entry


def _ended(fact: Finished) -> Ended:
    match fact.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return Ended(reason=fact.reason)
        case FinishReason.ABORT:
            # Had we asked for it, the request would have ended at once and not be here.
            return error("the worker dropped the request unasked", "worker_aborted", 500)
        case FinishReason.ERROR:
            return error(fact.message, "engine_error", 500)
        case _:
            assert_never(fact.reason)
