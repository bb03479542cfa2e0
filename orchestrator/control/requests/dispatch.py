"""Dispatch: grants queued requests to owners that have room, and has owners let go of them."""

from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.control.requests.response_stream import OpenStreams
from mlx_dp.orchestrator.control.routing.rank import Owner, RankTable, terms
from mlx_dp.orchestrator.control.routing.router import Placement, Router
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.proto.messages.protocol import Abort, Down, Submit

Post = Callable[[Owner, Down], bool]
"""Send a message to an owner; False when nothing was sent, which the callee deals with."""


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
        while (found := self._next()) is not None:
            self._grant(*found, now)

    def _next(self) -> tuple[RequestEntry, Placement] | None:
        """The oldest request that some owner can take.

        A request that waits holds up younger ones only at the owners where it could run itself:
        room that frees there is kept for it, or small requests would overtake a large one for ever.
        """
        reserved: frozenset[int] = frozenset()
        for entry in self._table.queue.heads():
            placement = self._router.choose(tuple(self._ranks.owners()), entry, avoid=reserved)
            if placement is not None:
                return entry, placement
            reserved |= self._could_run(entry)
        return None

    def _could_run(self, entry: RequestEntry) -> frozenset[int]:
        """The owners that could take the request if they were empty."""
        if entry.pinned is not None:
            return frozenset({entry.pinned})
        return frozenset(
            owner.index for owner in self._ranks.owners() if terms(owner.limits, entry) is not None
        )

    def _grant(self, entry: RequestEntry, placement: Placement, now: float) -> None:
        """Send the request to the owner, or leave it as it was when that failed.

        An owner that could not be sent a request takes none for now, so it is not chosen again.
        """
        owner, granted = placement.owner, placement.terms
        if not self._post(owner, _submit(entry, granted.max_tokens)):
            assert not owner.takes_requests, f"owner {owner.index} took nothing and is asked again"
            return
        self._table.grant(entry, owner.index, granted.max_tokens, now)
        owner.grant(entry, granted, now)
        self._router.holds(owner, entry)
        self._streams.granted(entry, owner.index, placement.reason)

    def could_go_elsewhere(self, entry: RequestEntry, owner: Owner) -> bool:
        """Whether an owner other than this one takes requests, and has a slot for this one."""
        return entry.pinned is None and any(
            other.takes_requests and other.free_slots > 0 and terms(other.limits, entry) is not None
            for other in self._ranks.owners()
            if other is not owner
        )

    def withdraw(self, owner: Owner, grant: Grant, entry: RequestEntry, now: float) -> None:
        """Queue the request again, for another owner; what this one says of the grant is ignored.

        The owner is told to let go of the request, and keeps the slot until it says so.
        """
        grant.withdrawn = True
        self._table.requeue(entry, now)
        self._let_go(owner, grant, entry, now)

    def give_back(self, owner: Owner, grant: Grant, entry: RequestEntry, now: float) -> None:
        """The owner has no memory for the request: it goes next, at any owner."""
        owner.ran_short(grant)
        self._table.requeue(entry, now)

    def release(self, owner: Owner, grant: Grant, entry: RequestEntry) -> None:
        """The owner is done with the request, and keeps what it computed in its prefix cache."""
        owner.release(grant)
        self._router.holds(owner, entry)

    def forget_prefixes(self, owner: Owner) -> None:
        """The owner has dropped what it had cached."""
        self._router.forget(owner.index)

    def abort(self, entry: RequestEntry, now: float) -> None:
        """Have the owner of a request let go of it, which is about to end."""
        assert entry.owner is not None, f"request {entry.request_id} has no owner"
        owner = self._ranks.get(entry.owner)
        assert owner is not None, f"request {entry.request_id}: no owner {entry.owner}"
        grant = owner.grant_of(entry.request_id, entry.epoch)
        assert grant is not None, f"request {entry.request_id} has no grant"
        self._let_go(owner, grant, entry, now)

    def _let_go(self, owner: Owner, grant: Grant, entry: RequestEntry, now: float) -> None:
        if grant.prefilled:
            self._router.holds(owner, entry)
        owner.start_leaving(grant)
        self._send_abort(owner, grant, now)

    def retry_aborts(self, now: float) -> None:
        """Send the aborts again for which an owner was too congested."""
        for owner in self._ranks.owners():
            for grant in owner.leaving.values():
                if not grant.abort_sent and not self._send_abort(owner, grant, now):
                    break

    def _send_abort(self, owner: Owner, grant: Grant, now: float) -> bool:
        sent = self._post(owner, Abort(request_id=grant.request_id, epoch=grant.epoch))
        if sent:
            owner.abort_sent(grant, now)
        return sent


def _submit(entry: RequestEntry, max_tokens: int) -> Submit:
    """The message that begins the next epoch of a request."""
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
