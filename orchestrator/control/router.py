"""The choice of an owner for one request: a pure function of what the owners hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from mlx_dp.orchestrator.control.ledger import RequestEntry
from mlx_dp.orchestrator.control.owner import Owner, Terms, terms
from mlx_dp.orchestrator.control.prefix_affinity import (
    COLD,
    HIT,
    LOAD,
    PREFIX_AFFINITY,
    PrefixAffinity,
)
from mlx_dp.proto.errors import ConfigError

Policy = Callable[[Sequence[Owner], RequestEntry], Sequence[Owner]]
"""From the owners that have room to the equally good best of them; never empty."""

EXPLICIT_RANK: Final = "explicit_rank"


def round_robin(owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
    """Everyone is equally good, so that the rotation alone decides."""
    return owners


def total_requests(owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
    """The fewest requests in hand."""
    least = min(len(owner.leases) for owner in owners)
    return [owner for owner in owners if len(owner.leases) == least]


def total_tokens(owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
    """The fewest tokens in hand, prompts and answers so far; then the fewest requests."""
    least = min((owner.held_tokens, len(owner.leases)) for owner in owners)
    return [owner for owner in owners if (owner.held_tokens, len(owner.leases)) == least]


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        "round_robin": round_robin,
        "total_requests": total_requests,
        "total_tokens": total_tokens,
    }
)

METHODS: Final = (*POLICIES, PREFIX_AFFINITY)


def check_method(name: str) -> None:
    """Raise ConfigError for a method that there is not: one that does nothing would mislead."""
    if name not in METHODS:
        raise ConfigError(
            f"--load-balance-method {name!r} is unknown: use one of {', '.join(METHODS)}"
        )


def routing_reasons(load_balance_method: str) -> tuple[str, ...]:
    """Every reason that a grant can have under this method."""
    if load_balance_method == PREFIX_AFFINITY:
        return (EXPLICIT_RANK, HIT, LOAD, COLD)
    return (EXPLICIT_RANK, load_balance_method)


@dataclass(frozen=True, slots=True)
class Choice:
    """The owner, what the request gets there, and why this one."""

    owner: Owner
    terms: Terms
    reason: str


class Router:
    """Applies one policy, and rotates among equals, so that a quiet fleet shares its work.

    The policy by prefixes has to be told what owners hold; to the others it is the same.
    """

    def __init__(self, load_balance_method: str) -> None:
        check_method(load_balance_method)
        self._name: Final = load_balance_method
        self._affinity: Final = PrefixAffinity() if load_balance_method == PREFIX_AFFINITY else None
        self._policy: Final = (
            POLICIES[load_balance_method] if self._affinity is None else self._affinity.best
        )
        self._last = -1

    def choose(
        self, owners: Sequence[Owner], entry: RequestEntry, *, avoid: frozenset[int] = frozenset()
    ) -> Choice | None:
        """Choose for one request, or None when it has to wait.

        ``owners`` are the ready ones in any order; ``avoid`` are kept free for others. An
        explicit rank has no alternative, and does not move the rotation.
        """
        room: list[Owner] = []
        granted: dict[int, Terms] = {}
        for owner in owners:
            if entry.pinned not in (None, owner.index) or owner.index in avoid:
                continue
            if not owner.takes_requests or owner.free_slots <= 0:
                continue
            if entry.request_id in owner.leases:
                # It was withdrawn there, and the owner has not let go of it yet.
                continue
            if owner.tries_suspect:
                # Whoever joined it now could be what kills the owner, and it would have the blame.
                continue
            needed = terms(owner.limits, entry)
            if needed is not None and owner.has_room(needed):
                room.append(owner)
                granted[owner.index] = needed
        if not room:
            return None
        if entry.pinned is not None:
            return self._choice(room[0], granted, entry, EXPLICIT_RANK)
        best = self._rotate(self._policy(room, entry))
        self._last = best.index
        reason = self._name if self._affinity is None else self._affinity.reason(best, entry)
        return self._choice(best, granted, entry, reason)

    def _choice(
        self, owner: Owner, granted: Mapping[int, Terms], entry: RequestEntry, reason: str
    ) -> Choice:
        needed = granted[owner.index]
        if self._affinity is not None:
            needed = replace(needed, cached_tokens=self._affinity.cached_tokens(owner, entry))
        return Choice(owner, needed, reason)

    def holds(self, owner: Owner, entry: RequestEntry) -> None:
        """An owner has, or is about to have, all tokens of a request so far."""
        if self._affinity is not None:
            self._affinity.holds(owner, entry)

    def forget(self, index: int) -> None:
        """An owner has lost or dropped the prefixes that it held."""
        if self._affinity is not None:
            self._affinity.forget(index)

    def _rotate(self, equals: Sequence[Owner]) -> Owner:
        """The first index after the last one chosen, else the lowest."""
        return min(equals, key=lambda owner: (owner.index <= self._last, owner.index))
