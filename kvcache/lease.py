"""What one running request holds of its owner, taken and given back as a whole."""

from dataclasses import dataclass
from enum import Enum, auto

from mlx_dp.kvcache.auxiliary_slots import AuxiliarySlots
from mlx_dp.kvcache.request_slots import RequestSlots
from mlx_dp.kvcache.token_budget import KVBudget
from mlx_dp.proto.ownership import OwnerCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A request's slots and tokens; released once, by its holder."""

    request_id: int
    slot: int
    auxiliary_slot: int | None


class Shortage(Enum):
    """What an owner has too little of to take one more request."""

    SLOTS = auto()
    TOKENS = auto()


class OwnerPools:
    """All pools of one owner. A request gets its share of every one of them, or of none."""

    def __init__(self, capacity: OwnerCapacity, *, hybrid: bool) -> None:
        assert not hybrid or capacity.auxiliary_slots >= capacity.request_slots, capacity
        self._hybrid = hybrid
        self._slots = RequestSlots(capacity.request_slots)
        self._tokens = KVBudget(capacity.pool_tokens)
        self._auxiliary = AuxiliarySlots(capacity.auxiliary_slots)

    @property
    def reserved_tokens(self) -> int:
        return self._tokens.reserved_tokens

    @property
    def free_tokens(self) -> int | None:
        return self._tokens.free_tokens

    @property
    def auxiliary_used(self) -> int:
        return self._auxiliary.size - self._auxiliary.free_slots

    def lease(self, request_id: int, num_tokens: int) -> Lease | Shortage:
        if not self._slots.free_slots:
            return Shortage.SLOTS
        if not self._tokens.reserve(request_id, num_tokens):
            return Shortage.TOKENS
        slot = self._slots.alloc()
        assert slot is not None, "a free slot was counted"
        auxiliary_slot = None
        if self._hybrid:
            auxiliary_slot = self._auxiliary.alloc(request_id)
            assert auxiliary_slot is not None, "capacity backs every request slot"
        return Lease(request_id=request_id, slot=slot, auxiliary_slot=auxiliary_slot)

    def release(self, lease: Lease) -> None:
        if lease.auxiliary_slot is not None:
            self._auxiliary.free(lease.auxiliary_slot, lease.request_id)
        self._tokens.release(lease.request_id)
        self._slots.free(lease.slot)

    def check(self) -> None:
        self._slots.check()
        self._tokens.check()
        self._auxiliary.check()
