"""The numbered slots of a running request, allocated and released together."""

from dataclasses import dataclass
from enum import Enum, auto

from mlx_dp.kvcache.prefix.cached_prefix import PrefixStore
from mlx_dp.kvcache.prefix.prefix_cache import PrefixCache
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.slots.auxiliary_slots import AuxiliarySlots
from mlx_dp.kvcache.slots.request_slots import RequestSlots
from mlx_dp.proto.capacity.ownership import OwnerCapacity, auxiliary_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A request's slots; released once, by its holder."""

    request_id: int
    slot: int
    auxiliary_slot: int | None


class Shortage(Enum):
    """The kind of slot that an owner lacks for one more request."""

    SLOTS = auto()
    STATES = auto()


class OwnerPools:
    """All slots of one owner, and the prefix cache, which shares the auxiliary ones.

    A request gets a slot of every kind, or none at all. With the prefix cache, the cache keeps or
    frees a request's auxiliary slot; without it, the slot is released with the request.
    """

    def __init__(
        self, capacity: OwnerCapacity, facts: PrefixFacts, store: PrefixStore, *, prefix_cache: bool
    ) -> None:
        hybrid = facts.shape.hybrid
        assert not hybrid or capacity.auxiliary_slots >= capacity.request_slots, capacity
        self._slots = RequestSlots(capacity.request_slots)
        self._stateful = hybrid or (facts.stateful and prefix_cache)
        # Models with sliding windows run without slots; only their cached snapshots need them.
        windowed = capacity.request_slots * auxiliary_ratio(prefix_cache=True)
        self._auxiliary = AuxiliarySlots(
            capacity.auxiliary_slots if hybrid else windowed if self._stateful else 0
        )
        self.cache = PrefixCache(store, self._auxiliary, facts) if prefix_cache else None

    @property
    def auxiliary_used(self) -> int:
        return self._auxiliary.size - self._auxiliary.free_slots

    def lease(self, request_id: int) -> Lease | Shortage:
        if not self._slots.free_slots:
            return Shortage.SLOTS
        auxiliary_slot = None
        if self._stateful:
            auxiliary_slot = self._alloc_state(request_id)
            if auxiliary_slot is None:
                return Shortage.STATES
        slot = self._slots.alloc()
        assert slot is not None, "a free slot was counted"
        return Lease(request_id=request_id, slot=slot, auxiliary_slot=auxiliary_slot)

    def _alloc_state(self, request_id: int) -> int | None:
        if self.cache is not None:
            return self.cache.snapshot_slot(request_id)
        return self._auxiliary.alloc(request_id)

    def release(self, lease: Lease) -> None:
        """Free the slots that the prefix cache does not free."""
        if self.cache is None and lease.auxiliary_slot is not None:
            self._auxiliary.free(lease.auxiliary_slot, lease.request_id)
        self._slots.free(lease.slot)

    def check(self) -> None:
        """Assert that all slots and nodes are consistent. Looks at every one."""
        self._slots.check()
        self._auxiliary.check()
        if self.cache is not None:
            self.cache.check()
