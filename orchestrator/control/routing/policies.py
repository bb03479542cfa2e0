"""Routing policies: the protocol, the stateless ones, and the table of all by name."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from mlx_dp.orchestrator.control.routing import prefix_affinity
from mlx_dp.orchestrator.control.state.owner import Owner
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.proto.errors import ConfigError

EXPLICIT_RANK: Final = "explicit_rank"
"""The reason of a grant to the rank that the client asked for, under any policy."""


class Policy(Protocol):
    """Chooses among owners that have room, and may track their prefix caches.

    The router calls ``best``, then ``reason`` and ``cached_tokens`` for the owner that it chose.
    """

    def best(self, owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
        """Return the best owners, at least one. The router rotates among equally good ones."""

    def reason(self, owner: Owner, entry: RequestEntry) -> str:
        """Why the request goes to this owner: one of ``PolicyRow.reasons``."""

    def cached_tokens(self, owner: Owner, entry: RequestEntry) -> int:
        """Tokens of the request that the owner is thought to hold already."""

    def note_held(self, owner: Owner, entry: RequestEntry) -> None:
        """Note that an owner caches, or is about to cache, all tokens of a request so far."""

    def forget_owner(self, dp_rank: int) -> None:
        """Note that an owner has lost or dropped its cached prefixes."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy's factory, which gets the source of random numbers, and the policy's properties."""

    make: Callable[[random.Random], Policy]
    reasons: tuple[str, ...]
    """Every reason that it gives for its choices."""
    needs_prefix_cache: bool = False
    """It is useless if owners do not cache prefixes."""
    summary: str = ""
    """What ``--help`` says behind the name, if the name does not say it all."""


Best = Callable[[Sequence[Owner], RequestEntry], Sequence[Owner]]


@dataclass(frozen=True, slots=True)
class Stateless:
    """A policy that is a pure function of the owners' present load."""

    name: str
    choose: Best

    def best(self, owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
        return self.choose(owners, entry)

    def reason(self, owner: Owner, entry: RequestEntry) -> str:
        return self.name

    def cached_tokens(self, owner: Owner, entry: RequestEntry) -> int:
        return 0

    def note_held(self, owner: Owner, entry: RequestEntry) -> None:
        pass

    def forget_owner(self, dp_rank: int) -> None:
        pass


def round_robin(owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
    """All owners are equally good, so that the rotation alone decides."""
    return owners


def total_requests(owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
    """The owners with the fewest requests."""
    least = min(len(owner.grants) for owner in owners)
    return [owner for owner in owners if len(owner.grants) == least]


def total_tokens(owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
    """The owners with the fewest tokens, prompts and answers so far; then the fewest requests."""
    least = min((owner.held_tokens, len(owner.grants)) for owner in owners)
    return [owner for owner in owners if (owner.held_tokens, len(owner.grants)) == least]


def _stateless(choose: Best, summary: str = "") -> tuple[str, PolicyRow]:
    name = choose.__name__
    return name, PolicyRow(lambda rng: Stateless(name, choose), (name,), summary=summary)


POLICIES: Final[Mapping[str, PolicyRow]] = MappingProxyType(
    dict(
        (
            _stateless(round_robin),
            _stateless(total_requests, "fewest running"),
            _stateless(total_tokens, "fewest tokens in use"),
            (
                prefix_affinity.PREFIX_AFFINITY,
                PolicyRow(
                    lambda rng: prefix_affinity.PrefixAffinity(),
                    prefix_affinity.REASONS,
                    needs_prefix_cache=True,
                    summary="least to compute: prefers an owner that has the prompt's prefix "
                    "cached, unless it is busier",
                ),
            ),
        )
    )
)
"""Every policy by the name that ``--load-balance-method`` takes."""

METHODS: Final = tuple(POLICIES)


def methods_in_words() -> str:
    """Return all policies as one phrase, with their summaries, for ``--help``."""
    *others, last = (
        f"{name} ({row.summary})" if row.summary else name for name, row in POLICIES.items()
    )
    return f"{', '.join(others)} or {last}"


def policy_row(load_balance_method: str) -> PolicyRow:
    """Return the policy of this name. Raises ConfigError when there is none."""
    row = POLICIES.get(load_balance_method)
    if row is None:
        raise ConfigError(
            f"--load-balance-method {load_balance_method!r} is unknown: use one of "
            f"{', '.join(METHODS)}"
        )
    return row


def routing_reasons(load_balance_method: str) -> tuple[str, ...]:
    """Every reason that a grant can have under this method."""
    return (EXPLICIT_RANK, *policy_row(load_balance_method).reasons)
