"""Auxiliary-state slots of a hybrid model's owner."""

import heapq


class AuxiliarySlots:
    """A fixed number of state slots, each idle or with one owner: a request.

    A request gives its slot back when it ends, with the prefix cache and without: nothing else
    can own one yet. Only the present owner may free a slot.
    Invariant: every slot number is either in ``_idle`` or a key of ``_owner``.
    """

    def __init__(self, size: int) -> None:
        assert size >= 0, size
        self._size = size
        self._idle = list(range(size))
        self._owner: dict[int, int] = {}

    @property
    def size(self) -> int:
        return self._size

    @property
    def free_slots(self) -> int:
        return len(self._idle)

    def alloc(self, request_id: int) -> int | None:
        """Take a slot for a request, or return None when all have an owner."""
        if not self._idle:
            return None
        slot = heapq.heappop(self._idle)
        self._owner[slot] = request_id
        return slot

    def free(self, slot: int, request_id: int) -> None:
        """Give back a slot that this request owns."""
        owner = self._owner.get(slot)
        assert owner == request_id, f"slot {slot} belongs to {owner}, not to request {request_id}"
        del self._owner[slot]
        heapq.heappush(self._idle, slot)

    def check(self) -> None:
        assert len(self._idle) == len(set(self._idle)), self._idle
        assert self._owner.keys().isdisjoint(self._idle), (self._owner, self._idle)
        assert self._owner.keys() | set(self._idle) == set(range(self._size)), self._owner
