"""The router: chooses an owner for a request, the best by the policy of those that have room."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlx_dp.orchestrator.control.routing.policies import EXPLICIT_RANK, policy_row
from mlx_dp.orchestrator.control.routing.rank import Owner, Terms, terms
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry


@dataclass(frozen=True, slots=True)
class Placement:
    """The owner that a request goes to, what it gets there, and the reason."""

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
        """Choose for one request, or None when it has to wait.

        ``owners`` are the ready ones in any order; ``avoid`` are kept free for others. An
        explicit rank has no alternative, and does not move the rotation.
        """
        room: list[Owner] = []
        offers: dict[int, Terms] = {}
        for owner in owners:
            if owner.index in avoid:
                continue
            offer = _offer(owner, entry)
            if offer is not None:
                room.append(owner)
                offers[owner.index] = offer
        if not room:
            return None
        if entry.pinned is not None:
            best, reason = room[0], EXPLICIT_RANK
        else:
            best = self._rotate(self._policy.best(room, entry))
            self._last = best.index
            reason = self._policy.reason(best, entry)
        cached_tokens = self._policy.cached_tokens(best, entry)
        return Placement(best, replace(offers[best.index], cached_tokens=cached_tokens), reason)

    def holds(self, owner: Owner, entry: RequestEntry) -> None:
        """An owner has, or is about to have, all tokens of a request so far."""
        self._policy.holds(owner, entry)

    def forget(self, index: int) -> None:
        """An owner has lost or dropped the prefixes that it held."""
        self._policy.forget(index)

    def _rotate(self, equals: Sequence[Owner]) -> Owner:
        """The first index after the last one chosen, else the lowest."""
        return min(equals, key=lambda owner: (owner.index <= self._last, owner.index))


def _offer(owner: Owner, entry: RequestEntry) -> Terms | None:
    """What the request would get from this owner now; None when it cannot go there."""
    if entry.pinned not in (None, owner.index):
        return None
    if not owner.takes_requests or owner.free_slots <= 0:
        return None
    if entry.request_id in owner.grants:
        # The request was withdrawn there, and the owner has not let go of it yet.
        return None
    if owner.tries_suspect:
        # A request that joined now could crash the owner, and the suspect would be blamed.
        return None
    needed = terms(owner.limits, entry)
    return needed if needed is not None and owner.has_room(needed) else None
