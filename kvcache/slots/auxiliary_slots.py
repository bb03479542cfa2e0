"""Auxiliary-state slots: numbers for the states of running requests and for snapshots of them."""

import heapq
from enum import Enum, auto
from typing import Final


class _Tree(Enum):
    TREE = auto()


TREE: Final = _Tree.TREE
"""The prefix tree as the owner of a slot; every other owner is a request, by its id."""

Owner = int | _Tree


class AuxiliarySlots:
    """A fixed number of state slots, counted from 0, each idle or with one owner.

    A request owns its live slot and the slots of its next snapshots. A snapshot that the prefix
    tree keeps belongs to the tree alone. Only the present owner may free a slot or give it away. A
    slot is a number; the store has the arrays.
    Invariant: every slot number is either in ``_idle`` or a key of ``_owner``.
    """

    def __init__(self, size: int) -> None:
        assert size >= 0, size
        self._size = size
        self._idle = list(range(size))
        self._owner: dict[int, Owner] = {}
        self._tree_slots = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def free_slots(self) -> int:
        return len(self._idle)

    @property
    def tree_slots(self) -> int:
        return self._tree_slots

    @property
    def request_slots(self) -> int:
        """The number of slots of running requests: live states and future snapshots."""
        return len(self._owner) - self._tree_slots

    def owner_of(self, slot: int) -> Owner | None:
        return self._owner.get(slot)

    def owned_by(self, owner: Owner) -> frozenset[int]:
        """The slots of one owner. It visits every slot, so it is for checks only."""
        return frozenset(slot for slot, holder in self._owner.items() if holder == owner)

    def alloc(self, request_id: int) -> int | None:
        """Take a slot for a request, or return None when all have an owner."""
        if not self._idle:
            return None
        slot = heapq.heappop(self._idle)
        self._owner[slot] = request_id
        return slot

    def give_to_tree(self, slot: int, request_id: int) -> None:
        """Hand a request's slot over to the prefix tree."""
        self._check_owner(slot, request_id)
        self._owner[slot] = TREE
        self._tree_slots += 1

    def free(self, slot: int, owner: Owner) -> None:
        """Give back a slot of this owner."""
        self._check_owner(slot, owner)
        del self._owner[slot]
        if owner is TREE:
            self._tree_slots -= 1
        heapq.heappush(self._idle, slot)

    def _check_owner(self, slot: int, owner: Owner) -> None:
        holder = self._owner.get(slot)
        assert holder == owner, f"slot {slot} belongs to {_name(holder)}, not to {_name(owner)}"

    def check(self) -> None:
        assert len(self._idle) == len(set(self._idle)), self._idle
        assert self._owner.keys().isdisjoint(self._idle), (self._owner, self._idle)
        assert self._owner.keys() | set(self._idle) == set(range(self._size)), self._owner
        assert self._tree_slots == len(self.owned_by(TREE)), (self._tree_slots, self._owner)
        assert self.free_slots + self.request_slots + self.tree_slots == self._size


def _name(owner: Owner | None) -> str:
    match owner:
        case None:
            return "no owner"
        case _Tree():
            return "the prefix tree"
        case int():
            return f"request {owner}"
