"""The slots that an owner gives to running requests."""

import heapq


class RequestSlots:
    """A fixed number of slots, each idle or held by one request.

    The lowest idle slot goes first, so that the same requests get the same slots each time.
    Invariant: every slot number is either in ``_idle`` or in ``_held``.
    """

    def __init__(self, size: int) -> None:
        assert size >= 1, size
        self._size = size
        self._idle = list(range(size))
        self._held: set[int] = set()

    @property
    def size(self) -> int:
        return self._size

    @property
    def free_slots(self) -> int:
        return len(self._idle)

    def alloc(self) -> int | None:
        """Take a slot, or return None when all are held."""
        if not self._idle:
            return None
        slot = heapq.heappop(self._idle)
        self._held.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give back a slot that is held."""
        assert slot in self._held, f"slot {slot} of {self._size} is not held"
        self._held.remove(slot)
        heapq.heappush(self._idle, slot)

    def check(self) -> None:
        assert len(self._idle) == len(set(self._idle)), self._idle
        assert self._held.isdisjoint(self._idle), self._held.intersection(self._idle)
        assert self._held.union(self._idle) == set(range(self._size)), (self._held, self._idle)
