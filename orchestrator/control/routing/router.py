"""Router: chooses, by a policy, among the owners that have room for a request."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlx_dp.orchestrator.control.routing.policies import EXPLICIT_RANK, policy_row
from mlx_dp.orchestrator.control.state.owner import Owner, Terms, terms
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry


@dataclass(frozen=True, slots=True)
class Placement:
    """The owner chosen for a request, the terms that it gets there, and the reason."""

    owner: Owner
    terms: Terms
    reason: str


class Router:
    """Applies one policy, and rotates among equals, so that a quiet fleet shares its work."""

    def __init__(self, load_balance_method: str, rng: random.Random) -> None:
        self._policy: Final = policy_row(load_balance_method).make(rng)
        self._last = -1

    def choose(
        self, owners: Sequence[Owner], entry: RequestEntry, *, avoid: frozenset[int] = frozenset()
    ) -> Placement | None:
        """Choose an owner for one request; None: the request has to wait.

        ``owners``: the ready ones, in any order. ``avoid``: owners kept free for older requests.
        A request with an explicit rank has no alternative, and does not advance the rotation.
        """
        candidates: list[Owner] = []
        offers: dict[int, Terms] = {}
        for owner in owners:
            if owner.dp_rank in avoid:
                continue
            offer = _offer(owner, entry)
            if offer is not None:
                candidates.append(owner)
                offers[owner.dp_rank] = offer
        if not candidates:
            return None
        if entry.pinned is not None:
            best, reason = candidates[0], EXPLICIT_RANK
        else:
            best = self._rotate(self._policy.best(candidates, entry))
            self._last = best.dp_rank
            reason = self._policy.reason(best, entry)
        cached_tokens = self._policy.cached_tokens(best, entry)
        return Placement(best, replace(offers[best.dp_rank], cached_tokens=cached_tokens), reason)

    def note_held(self, owner: Owner, entry: RequestEntry) -> None:
        """Note that an owner caches, or is about to cache, all tokens of a request so far."""
        self._policy.note_held(owner, entry)

    def forget_owner(self, dp_rank: int) -> None:
        """Note that an owner has lost or dropped its cached prefixes."""
        self._policy.forget_owner(dp_rank)

    def _rotate(self, equals: Sequence[Owner]) -> Owner:
        """Return the owner with the first rank after the last one chosen, else the lowest."""
        return min(equals, key=lambda owner: (owner.dp_rank <= self._last, owner.dp_rank))


def _offer(owner: Owner, entry: RequestEntry) -> Terms | None:
    """Return the terms that this owner can offer now; None if the request cannot go there."""
    if entry.pinned not in (None, owner.dp_rank):
        return None
    if not owner.takes_requests or owner.free_slots <= 0:
        return None
    if entry.request_id in owner.grants:
        # The request was withdrawn there, and the owner has not confirmed the abort yet.
        return None
    if owner.runs_sole_suspect:
        # A request that joined now could crash the owner, and the suspect would be blamed.
        return None
    needed = terms(owner.limits, entry)
    return needed if needed is not None and owner.has_room(needed) else None
