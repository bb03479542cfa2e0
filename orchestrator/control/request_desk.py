"""Moves requests through their lives: what owners report, clients cancel, and time runs out on."""

from typing import Final, assert_never

from mlx_dp.orchestrator.control.answer_desk import AnswerDesk
from mlx_dp.orchestrator.control.answers import RequestAnswer
from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.dispatch import Dispatcher, Post
from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry, RequestStatus
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.replay import after_loss
from mlx_dp.orchestrator.control.request_ends import RequestEnds, error
from mlx_dp.orchestrator.control.request_queue import RequestQueue
from mlx_dp.orchestrator.control.router import Router
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.service import Ended, Generation
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages import (
    Accepted,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
)


class RequestDesk:
    """The requests' side of the controller. Facts and the time come in; messages go to ``post``.

    Every fact is checked against the lease of its grant, so that what an owner says of an earlier
    epoch changes nothing. A request that ended early leaves its lease behind, until the owner
    gives the slot back.
    """

    def __init__(
        self,
        options: QueueOptions,
        max_attempts: int,
        book: OwnerBook,
        answers: AnswerDesk,
        tally: Tally,
        post: Post,
    ) -> None:
        self._max_attempts: Final = max_attempts
        self._answers: Final = answers
        self._tally: Final = tally
        self._ledger: Final = Ledger()
        self._queue: Final = RequestQueue(options.max_queued_requests)
        router = Router(options.load_balance_method)
        self._dispatcher: Final = Dispatcher(self._ledger, self._queue, book, router, post)
        self._ends: Final = RequestEnds(
            options, self._ledger, self._queue, book, answers, self._dispatcher
        )

    @property
    def queue(self) -> RequestQueue:
        """To be read, not changed."""
        return self._queue

    @property
    def idle(self) -> bool:
        """No request is in hand."""
        return len(self._ledger) == 0

    def submit(self, generation: Generation, now: float) -> RequestAnswer:
        """Take a request in. The caller has asked whether the queue is full."""
        entry = self._ledger.open(generation, now)
        answer = self._answers.open(entry)
        self._ends.began(entry, now)
        self._queue.put(entry)
        return answer

    def dispatch(self, now: float) -> None:
        """Grant whatever can be granted."""
        while (granted := self._dispatcher.next_grant(now)) is not None:
            entry, choice = granted
            self._ends.granted(entry)
            self._answers.granted(entry, choice.owner.index, choice.reason)

    def leave(self, request_id: int, reason: FinishReason, now: float) -> None:
        """Nobody wants the rest; requests that have ended are no error."""
        entry = self._ledger.get(request_id)
        if entry is not None:
            self._ends.end_early(entry, Ended(reason=reason), now)

    def expire(self, now: float) -> None:
        """End what has waited or lived for too long, and repeat what could not be said."""
        self._ends.expire(now)
        self._dispatcher.retry_aborts(now)

    def abandon(self, message: str, code: str, now: float) -> None:
        """End everything, since nobody will ever serve it."""
        for entry in tuple(self._ledger):
            self._ends.end_early(entry, error(message, code, 503), now)

    def abandon_pinned(self, owner: int, message: str, now: float) -> None:
        """End what may only go to an owner that will never be back."""
        for entry in tuple(self._ledger):
            if entry.status is RequestStatus.QUEUED and entry.pinned == owner:
                self._ends.end_early(entry, error(message, "worker_failed", 503), now)

    def accepted(self, owner: Owner, fact: Accepted) -> None:
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None or lease.accepted:
            self._tally.stale_facts += 1
            return
        owner.accepted(lease)
        entry = self._current(lease)
        if entry is not None:
            self._ledger.accept(entry, fact.cached_tokens)
            self._answers.accepted(entry, owner.index)

    def rejected(self, owner: Owner, fact: Rejected, now: float) -> None:
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None:
            self._tally.stale_facts += 1
            return
        if lease.accepted:
            raise ProtocolError(f"request {fact.request_id}: rejected after it was accepted")
        entry = self._current(lease)
        if entry is None:
            owner.release(lease)
            return
        match fact.reason:
            case RejectReason.NO_SLOT | RejectReason.NO_TOKENS | RejectReason.DRAINING:
                owner.closed |= fact.reason is RejectReason.DRAINING
                self._dispatcher.take_back(owner, lease, entry)
                self._ends.queued_again(entry, now)
            case RejectReason.TOO_LONG | RejectReason.INVALID:
                owner.release(lease)
                self._ends.end(
                    entry, error(fact.message, f"rejected_{fact.reason.value}", 400), now
                )
            case _:
                assert_never(fact.reason)

    def tokens(self, owner: Owner, fact: Tokens, now: float) -> None:
        """Raises ProtocolError for a gap, or more tokens than were asked for."""
        for chunk in fact.chunks:
            lease = owner.leases.get(chunk.request_id)
            if lease is None or lease.epoch != chunk.epoch:
                self._tally.stale_facts += 1
                continue
            entry = self._current(lease)
            if entry is not None:
                self._extend(owner, lease, entry, chunk, now)

    def _extend(
        self, owner: Owner, lease: Lease, entry: RequestEntry, chunk: TokenChunk, now: float
    ) -> None:
        before = entry.last_token_at
        if self._ledger.append(entry, chunk.index, chunk.ids, now):
            owner.yielded(lease, len(chunk.ids))
            self._tally.generated_by_owner[owner.index] += len(chunk.ids)
            self._answers.tokens(entry, chunk, before=before)
        else:
            self._tally.duplicate_chunks += 1

    def finished(self, owner: Owner, fact: Finished, now: float) -> None:
        """Raises ProtocolError when tokens are missing."""
        lease = owner.lease(fact.request_id, fact.epoch)
        if lease is None:
            self._tally.stale_facts += 1
            return
        if not lease.accepted:
            raise ProtocolError(f"request {fact.request_id}: finished before it was accepted")
        entry = self._current(lease)
        if entry is not None and fact.num_tokens != len(entry.emitted):
            raise ProtocolError(
                f"request {fact.request_id}: finished with {fact.num_tokens} tokens, of which "
                f"{len(entry.emitted)} arrived"
            )
        owner.release(lease)
        if entry is not None:
            self._ends.end(entry, _ended(fact), now)

    def owner_lost(
        self, leases: tuple[Lease, ...], detail: str, *, culprit: bool, now: float
    ) -> None:
        """An owner is gone with all it held. Its requests go to the front of the queue."""
        # The newest first, so that the oldest ends up at the very front.
        for lease in reversed(leases):
            entry = self._current(lease)
            if entry is None:
                continue
            ended = after_loss(
                entry, lease, detail, culprit=culprit, max_attempts=self._max_attempts
            )
            if ended is not None:
                self._ends.end(entry, ended, now)
                continue
            self._ledger.requeue(entry)
            self._queue.put_back(entry)
            self._ends.queued_again(entry, now)
            self._tally.requests_replayed += lease.accepted

    def _current(self, lease: Lease) -> RequestEntry | None:
        """The request that this lease is for, unless it has ended."""
        entry = self._ledger.get(lease.request_id)
        # A request moves on only after its lease is gone, so that no slot has two owners.
        assert entry is None or entry.epoch == lease.epoch, (lease.request_id, lease.epoch)
        return entry

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        self._ledger.check()
        self._queue.check()
        self._answers.check({entry.request_id for entry in self._ledger})
        queued = sum(entry.status is RequestStatus.QUEUED for entry in self._ledger)
        assert queued == len(self._queue), (queued, len(self._queue))
        self._ends.check()


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
