"""Dispatch: grants queued requests to owners with room; withdraws, releases and aborts grants."""

from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.control.requests.response_stream import OpenStreams
from mlx_dp.orchestrator.control.routing.router import Placement, Router
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Owner, terms
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.proto.messages.commands import Abort, Down, Submit

Post = Callable[[Owner, Down], bool]
"""Sends a message to an owner. False: nothing was sent, and the callee has marked the owner."""


class Dispatcher:
    """Late binding: a request stays in the queue until an owner can take it at once."""

    def __init__(
        self,
        table: RequestTable,
        ranks: RankTable,
        router: Router,
        streams: OpenStreams,
        post: Post,
    ) -> None:
        self._table: Final = table
        self._ranks: Final = ranks
        self._router: Final = router
        self._streams: Final = streams
        self._post: Final = post

    def dispatch(self, now: float) -> None:
        """Grant every request that can be granted now."""
        while (found := self._next_placement()) is not None:
            self._grant(*found, now)

    def _next_placement(self) -> tuple[RequestEntry, Placement] | None:
        """Return the oldest request that an owner can take, and its placement.

        A waiting request blocks younger ones only at owners where it could run itself: room that
        becomes free there is kept for it. Otherwise small requests would overtake a large one for
        ever.
        """
        reserved: frozenset[int] = frozenset()
        for entry in self._table.queue.heads():
            placement = self._router.choose(tuple(self._ranks.owners()), entry, avoid=reserved)
            if placement is not None:
                return entry, placement
            reserved |= self._owners_that_could_run(entry)
        return None

    def _owners_that_could_run(self, entry: RequestEntry) -> frozenset[int]:
        """Return the owners that could take the request if they were empty."""
        if entry.pinned is not None:
            return frozenset({entry.pinned})
        return frozenset(
            owner.dp_rank
            for owner in self._ranks.owners()
            if terms(owner.limits, entry) is not None
        )

    def _grant(self, entry: RequestEntry, placement: Placement, now: float) -> None:
        """Send the request to the owner; if the send fails, nothing changes.

        An owner to which a send failed takes no requests for now, so it is not chosen again.
        """
        owner, granted = placement.owner, placement.terms
        if not self._post(owner, _submit(entry, granted.max_tokens)):
            assert not owner.takes_requests, (
                f"owner {owner.dp_rank}: a send failed, yet it is eligible"
            )
            return
        self._table.grant(entry, owner.dp_rank, granted.max_tokens, now)
        owner.grant(entry, granted, now)
        self._router.note_held(owner, entry)
        self._streams.granted(entry, owner.dp_rank, placement.reason)

    def could_go_elsewhere(self, entry: RequestEntry, owner: Owner) -> bool:
        """Whether an owner other than this one takes requests, and has a slot for this one."""
        return entry.pinned is None and any(
            other.takes_requests and other.free_slots > 0 and terms(other.limits, entry) is not None
            for other in self._ranks.owners()
            if other is not owner
        )

    def withdraw(self, owner: Owner, grant: Grant, entry: RequestEntry, now: float) -> None:
        """Requeue the request for another owner; further events of this grant are ignored.

        The owner is sent an abort, and keeps the slot until it confirms.
        """
        grant.withdrawn = True
        self._table.requeue(entry, now)
        self._start_abort(owner, grant, entry, now)

    def requeue_unserved(self, owner: Owner, grant: Grant, entry: RequestEntry, now: float) -> None:
        """Requeue a request that its owner gave back for lack of room; it goes next, anywhere."""
        owner.release_unserved(grant)
        self._table.requeue(entry, now)

    def release(self, owner: Owner, grant: Grant, entry: RequestEntry) -> None:
        """Free the slot of a finished request, whose tokens stay in the owner's prefix cache."""
        owner.release(grant)
        self._router.note_held(owner, entry)

    def forget_prefixes(self, owner: Owner) -> None:
        """Note that the owner has dropped its cached prefixes."""
        self._router.forget_owner(owner.dp_rank)

    def abort(self, entry: RequestEntry, now: float) -> None:
        """Abort a request at its owner; the caller then ends the request."""
        assert entry.dp_rank is not None, f"request {entry.request_id} has no owner"
        owner = self._ranks.get(entry.dp_rank)
        assert owner is not None, f"request {entry.request_id}: no owner {entry.dp_rank}"
        grant = owner.grant_of(entry.request_id, entry.epoch)
        assert grant is not None, f"request {entry.request_id} has no grant"
        self._start_abort(owner, grant, entry, now)

    def _start_abort(self, owner: Owner, grant: Grant, entry: RequestEntry, now: float) -> None:
        if grant.prefilled:
            self._router.note_held(owner, entry)
        owner.start_abort(grant)
        self._send_abort(owner, grant, now)

    def retry_aborts(self, now: float) -> None:
        """Resend the aborts that failed because an owner was congested."""
        for owner in self._ranks.owners():
            for grant in owner.aborting.values():
                if not grant.abort_sent and not self._send_abort(owner, grant, now):
                    break

    def _send_abort(self, owner: Owner, grant: Grant, now: float) -> bool:
        sent = self._post(owner, Abort(request_id=grant.request_id, epoch=grant.epoch))
        if sent:
            owner.note_abort_sent(grant, now)
        return sent


def _submit(entry: RequestEntry, max_tokens: int) -> Submit:
    """Make the message that begins the next epoch of a request."""
    generation = entry.generation
    return Submit(
        request_id=entry.request_id,
        epoch=entry.epoch + 1,
        prompt_ids=generation.prompt_ids,
        output_ids=tuple(entry.emitted),
        max_tokens=max_tokens,
        stop_token_ids=generation.stop_token_ids,
        params=generation.params,
        cache_salt=generation.cache_salt,
        grammar=generation.grammar,
    )
