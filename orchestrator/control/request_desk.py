"""Moves requests through their lives: what clients ask, and loss and time do to them."""

from typing import Final

from mlx_dp.orchestrator.control.answer_desk import AnswerDesk
from mlx_dp.orchestrator.control.answers import RequestAnswer
from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.dispatch import Dispatcher, Post
from mlx_dp.orchestrator.control.ledger import Ledger, RequestStatus
from mlx_dp.orchestrator.control.owner import Lease, Owner, terms
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.owner_facts import OwnerFacts
from mlx_dp.orchestrator.control.recent_deaths import RecentDeaths
from mlx_dp.orchestrator.control.replay import after_loss, complete, on_trial, refit
from mlx_dp.orchestrator.control.request_ends import RequestEnds, error
from mlx_dp.orchestrator.control.request_queue import RequestQueue
from mlx_dp.orchestrator.control.router import Router
from mlx_dp.orchestrator.control.supervisor_steps import Loss
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.service import Ended, Generation
from mlx_dp.proto.messages import FinishReason


class RequestDesk:
    """The requests' side of the controller. Calls and the time come in; messages go to ``post``.

    ``facts`` takes in what owners say.
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
        self._strict_max_tokens: Final = options.strict_max_tokens
        self._book: Final = book
        self._answers: Final = answers
        self._tally: Final = tally
        self._ledger: Final = Ledger()
        self._queue: Final = RequestQueue(options.max_queued_requests)
        self._deaths: Final = RecentDeaths()
        self._router: Final = Router(options.load_balance_method)
        self._dispatcher: Final = Dispatcher(self._ledger, self._queue, book, self._router, post)
        self._ends: Final = RequestEnds(
            options, self._ledger, self._queue, book, answers, self._dispatcher
        )
        self.facts: Final = OwnerFacts(self._ledger, answers, tally, self._dispatcher, self._ends)

    @property
    def queue(self) -> RequestQueue:
        """To be read, not changed."""
        return self._queue

    @property
    def idle(self) -> bool:
        """No request is in hand."""
        return len(self._ledger) == 0

    def submit(self, generation: Generation, max_tokens: int | None, now: float) -> RequestAnswer:
        """Take a request in. The caller has asked whether it fits, and whether the queue is full.

        ``max_tokens``: the answer's length, or None when that depends on the owner.
        """
        entry = self._ledger.open(generation, now)
        entry.max_tokens = max_tokens
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

    def withdraw(self, owner: Owner, lease: Lease, now: float) -> None:
        """An owner has not accepted a request in time: others may have it, if there are any."""
        entry = self.facts.current(lease)
        if entry is not None and self._dispatcher.could_go_elsewhere(entry, owner):
            self._dispatcher.withdraw(owner, lease, entry, now)
            self._ends.queued_again(entry, now)
            self._tally.grants_withdrawn += 1

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

    def refit(self, now: float) -> None:
        """Owners have less room than they had, or are gone for good: nothing waits for more.

        What fits nowhere any longer gets what is left, as if it came now.
        """
        for entry in tuple(self._ledger):
            limits = self._book.limits_for(entry.pinned)
            if entry.status is not RequestStatus.QUEUED or limits is None:
                continue
            if terms(limits, entry) is None:
                ended = refit(entry, limits, strict=self._strict_max_tokens)
                if ended is not None:
                    self._ends.end_early(entry, ended, now)

    def forget_prefixes(self, owner: int) -> None:
        """An owner has dropped what it had cached."""
        self._router.forget(owner)

    def owner_lost(
        self, leases: tuple[Lease, ...], loss: Loss, *, culprit: bool, now: float
    ) -> None:
        """An owner is gone with all it held. Its requests go to the front of the queue."""
        tried = on_trial(leases) if culprit else None
        if culprit:
            self._deaths.add(frozenset(lease.request_id for lease in leases if lease.accepted), now)
        for lease in leases:
            entry = self.facts.current(lease)
            if entry is None:
                continue
            if tried is not None and lease is not tried:
                ended = complete(entry)
            else:
                guilty = culprit and not self._deaths.spare(entry.request_id)
                ended = after_loss(
                    entry, lease, loss, culprit=guilty, max_attempts=self._max_attempts
                )
            if ended is not None:
                self._ends.end(entry, ended, now)
                continue
            self._ledger.requeue(entry)
            self._queue.put_back(entry)
            self._ends.queued_again(entry, now)
            self._tally.requests_replayed += lease.accepted

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        self._ledger.check()
        self._queue.check()
        self._answers.check({entry.request_id for entry in self._ledger})
        queued = sum(entry.status is RequestStatus.QUEUED for entry in self._ledger)
        assert queued == len(self._queue), (queued, len(self._queue))
        self._ends.check()
