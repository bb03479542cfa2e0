"""What the controller knows of the ready owners, exactly, since it granted all of it."""

from collections.abc import Iterable
from typing import Final

from mlx_dp.orchestrator.control.liveness import Pulse
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.proto.admission import AdmissionLimits
from mlx_dp.proto.messages import Ready


class OwnerBook:
    """The owners that are ready. Who is not in it is given nothing."""

    def __init__(self, *, ahead: int = 0) -> None:
        self._ahead: Final = ahead
        self._owners: Final[dict[int, Owner]] = {}
        self._known: Final[dict[int, AdmissionLimits]] = {}
        self._limits: AdmissionLimits | None = None
        self._limits_changed = False
        self._vocab_size: int | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, index: int) -> Owner | None:
        return self._owners.get(index)

    def owners(self) -> Iterable[Owner]:
        return self._owners.values()

    def limits(self) -> AdmissionLimits | None:
        """Bounds of the roomiest owner; None while there was none.

        One that is lost counts with those it had, since it will be back: a request that only fits
        there waits for it. Of those that have all failed, the last one counts.
        """
        return self._limits

    def limits_for(self, index: int | None) -> AdmissionLimits | None:
        """Bounds of a request for this owner, or for any."""
        return self._limits if index is None else self._known.get(index, self._limits)

    def take_limits_changed(self) -> bool:
        """Whether bounds of an owner have changed, or are gone, since this was asked last."""
        changed, self._limits_changed = self._limits_changed, False
        return changed

    def vocab_size(self) -> int | None:
        """Token ids below this exist; None while no owner has been ready."""
        return self._vocab_size

    def add(self, index: int, identity: str, ready: Ready, now: float) -> Owner:
        """An owner is ready, with everything free."""
        assert index not in self._owners, f"owner {index} is in the book already"
        pulse = Pulse(heard_at=now, moved_at=now)
        owner = Owner(index=index, identity=identity, ready=ready, pulse=pulse, ahead=self._ahead)
        self._owners[index] = owner
        self._limits_changed |= self._known.get(index) != owner.limits
        self._known[index] = owner.limits
        self._refresh()
        return owner

    def remove(self, index: int) -> tuple[Lease, ...]:
        """Strike an owner out, and return what it held; nothing when it was never ready."""
        owner = self._owners.pop(index, None)
        if owner is None:
            return ()
        self._refresh()
        return tuple(owner.leases.values())

    def forget(self, index: int) -> None:
        """An owner that is not in the book will not be back."""
        assert index not in self._owners, f"owner {index} is in the book"
        self._limits_changed |= self._known.pop(index, None) is not None
        self._refresh()

    def _refresh(self) -> None:
        if self._known:
            self._limits = max(self._known.values(), key=lambda known: known.max_request_tokens)
        if self._owners:
            sizes = (owner.ready.shape.vocab_size for owner in self._owners.values())
            self._vocab_size = min(sizes)

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        for index, owner in self._owners.items():
            assert owner.index == index, (owner.index, index)
            assert self._known[index] == owner.limits, index
            owner.check()
