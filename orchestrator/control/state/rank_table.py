"""Rank table: the ready owners by rank, and the limits of requests that follow from them."""

from collections.abc import Iterable
from typing import Final

from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.state.owner import Owner
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.events import Ready


class RankTable:
    """The ready owners by ``dp_rank``. A worker that is not in it gets no request."""

    def __init__(self, *, ahead: int = 0) -> None:
        self._ahead: Final = ahead
        self._owners: Final[dict[int, Owner]] = {}
        self._known: Final[dict[int, AdmissionLimits]] = {}
        self._limits: AdmissionLimits | None = None
        self._limits_changed = False
        self._vocab_size: int | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, dp_rank: int) -> Owner | None:
        return self._owners.get(dp_rank)

    def owners(self) -> Iterable[Owner]:
        return self._owners.values()

    def limits(self) -> AdmissionLimits | None:
        """Return the limits of the largest owner; None until one was ready.

        A lost owner counts with the limits that it had, since it will be back: a request that fits
        only there waits for it. If all owners have failed for good, the last one counts.
        """
        return self._limits

    def limits_for(self, dp_rank: int | None) -> AdmissionLimits | None:
        """Return the limits of one owner, or those of the largest one for None."""
        return self._limits if dp_rank is None else self._known.get(dp_rank, self._limits)

    def take_limits_changed(self) -> bool:
        """Return whether an owner's limits have changed since the last call, and reset that."""
        changed, self._limits_changed = self._limits_changed, False
        return changed

    def vocab_size(self) -> int | None:
        """Return the number of token ids; None while no owner has been ready."""
        return self._vocab_size

    def add(self, dp_rank: int, identity: str, ready: Ready, now: float) -> Owner:
        """Add an owner that is ready, with everything free."""
        assert dp_rank not in self._owners, f"owner {dp_rank} is in the table already"
        heartbeats = Heartbeats(heard_at=now, progressed_at=now)
        owner = Owner(
            dp_rank=dp_rank,
            identity=identity,
            ready=ready,
            heartbeats=heartbeats,
            ahead=self._ahead,
        )
        self._owners[dp_rank] = owner
        self._limits_changed |= self._known.get(dp_rank) != owner.limits
        self._known[dp_rank] = owner.limits
        self._refresh()
        return owner

    def remove(self, dp_rank: int) -> tuple[Grant, ...]:
        """Remove an owner, and return its grants; none when it was never ready."""
        owner = self._owners.pop(dp_rank, None)
        if owner is None:
            return ()
        self._refresh()
        return tuple(owner.grants.values())

    def drop_limits(self, dp_rank: int) -> None:
        """Drop the limits of an owner that was removed for good."""
        assert dp_rank not in self._owners, f"owner {dp_rank} is in the table"
        self._limits_changed |= self._known.pop(dp_rank, None) is not None
        self._refresh()

    def _refresh(self) -> None:
        if self._known:
            self._limits = max(self._known.values(), key=lambda known: known.max_request_tokens)
        if self._owners:
            sizes = (owner.ready.shape.vocab_size for owner in self._owners.values())
            self._vocab_size = min(sizes)

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        for dp_rank, owner in self._owners.items():
            assert owner.dp_rank == dp_rank, (owner.dp_rank, dp_rank)
            assert self._known[dp_rank] == owner.limits, dp_rank
            owner.check()
