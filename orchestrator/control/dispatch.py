"""Gives queued requests to owners that have room, and takes back what could not be sent."""

from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry
from mlx_dp.orchestrator.control.owner import Lease, Owner, terms
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.request_queue import RequestQueue
from mlx_dp.orchestrator.control.router import Choice, Router
from mlx_dp.proto.messages import Abort, Down, Submit

Post = Callable[[Owner, Down], bool]
"""Hand a message to the owner's channel; False, when it took nothing, which is dealt with there."""


class Dispatcher:
    """Late binding: a request is queued here until the moment at which an owner can take it."""

    def __init__(
        self, ledger: Ledger, queue: RequestQueue, book: OwnerBook, router: Router, post: Post
    ) -> None:
        self._ledger: Final = ledger
        self._queue: Final = queue
        self._book: Final = book
        self._router: Final = router
        self._post: Final = post

    def next_grant(self, now: float) -> tuple[RequestEntry, Choice] | None:
        """Grant one request and send it, or return None: nobody can go now."""
        while len(self._queue):
            found = self._next()
            if found is None:
                return None
            entry, choice = found
            if self._grant(entry, choice, now):
                return found
        return None

    def _next(self) -> tuple[RequestEntry, Choice] | None:
        """The oldest request that can go.

        One that waits holds up younger ones only where it could run itself: what frees there is
        kept for it, or small requests would overtake a large one for ever.
        """
        reserved: frozenset[int] = frozenset()
        for entry in self._queue.heads():
            choice = self._choose(entry, reserved)
            if choice is not None:
                return entry, choice
            reserved |= self._could_run(entry)
        return None

    def _could_run(self, entry: RequestEntry) -> frozenset[int]:
        """The owners that could take it if they were empty."""
        if entry.pinned is not None:
            return frozenset({entry.pinned})
        return frozenset(
            owner.index for owner in self._book.owners() if terms(owner.limits, entry) is not None
        )

    def _choose(self, entry: RequestEntry, reserved: frozenset[int]) -> Choice | None:
        return self._router.choose(tuple(self._book.owners()), entry, avoid=reserved)

    def _grant(self, entry: RequestEntry, choice: Choice, now: float) -> bool:
        owner = choice.owner
        self._queue.remove(entry)
        self._ledger.grant(entry, owner.index, now)
        if entry.max_tokens is None:
            entry.max_tokens = choice.terms.max_tokens
        lease = owner.grant(entry, choice.terms, now)
        if self._post(owner, _submit(entry)):
            self._router.holds(owner, entry)
            return True
        owner.release(lease)
        self._ledger.requeue(entry)
        self._queue.put_back(entry)
        return False

    def take_back(self, owner: Owner, lease: Lease, entry: RequestEntry) -> None:
        """The owner has refused it: it goes next, elsewhere or there."""
        owner.ran_short(lease)
        self._ledger.requeue(entry)
        self._queue.put_back(entry)

    def preempted(self, owner: Owner, lease: Lease, entry: RequestEntry) -> None:
        """The owner gave it up for want of memory: it goes on next, elsewhere or there."""
        owner.ran_short(lease)
        self._ledger.requeue(entry)
        self._queue.put_back(entry)

    def could_go_elsewhere(self, entry: RequestEntry, owner: Owner) -> bool:
        """Whether another owner than this one takes requests, and has a slot for it."""
        return entry.pinned is None and any(
            other.takes_requests and other.free_slots > 0 and terms(other.limits, entry) is not None
            for other in self._book.owners()
            if other is not owner
        )

    def withdraw(self, owner: Owner, lease: Lease, entry: RequestEntry, now: float) -> None:
        """It goes next, elsewhere. Whatever this owner will say of its epoch counts no longer."""
        lease.withdrawn = True
        self._ledger.requeue(entry)
        self._queue.put_back(entry)
        self.leave(owner, lease, entry, now)

    def finished(self, owner: Owner, lease: Lease, entry: RequestEntry) -> None:
        """The owner has no more to do for it, and keeps what it computed."""
        owner.release(lease)
        self._router.holds(owner, entry)

    def leave(self, owner: Owner, lease: Lease, entry: RequestEntry, now: float) -> None:
        """Have an owner forget a request. Its slot is free only once it says so."""
        if lease.prefilled:
            self._router.holds(owner, entry)
        owner.leave(lease)
        self._tell(owner, lease, now)

    def retry_aborts(self, now: float) -> None:
        """Tell owners again that were congested when they should have been told."""
        for owner in self._book.owners():
            for lease in owner.leaving.values():
                if not lease.abort_sent and not self._tell(owner, lease, now):
                    break

    def _tell(self, owner: Owner, lease: Lease, now: float) -> bool:
        sent = self._post(owner, Abort(request_id=lease.request_id, epoch=lease.epoch))
        if sent:
            owner.abort_sent(lease, now)
        return sent


def _submit(entry: RequestEntry) -> Submit:
    assert entry.max_tokens is not None, f"request {entry.request_id} has no budget"
    generation = entry.generation
    return Submit(
        request_id=entry.request_id,
        epoch=entry.epoch,
        prompt_ids=generation.prompt_ids,
        output_ids=tuple(entry.emitted),
        max_tokens=entry.max_tokens,
        stop_token_ids=generation.stop_token_ids,
        params=generation.params,
        cache_salt=generation.cache_salt,
        grammar=generation.grammar,
    )
