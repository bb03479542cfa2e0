import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.kvcache.slots.auxiliary_slots import TREE, AuxiliarySlots, Owner

SIZE = 4


class AuxiliarySlotsMachine(RuleBasedStateMachine):
    """Against a plain dictionary of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AuxiliarySlots(SIZE)
        self.owners: dict[int, Owner] = {}

    @rule(request=st.integers(0, 5))
    def alloc(self, request: int) -> None:
        slot = self.slots.alloc(request)
        assert (slot is None) == (len(self.owners) == SIZE)
        if slot is not None:
            assert slot not in self.owners
            self.owners[slot] = request

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owners)))
        self.slots.free(slot, self.owners.pop(slot))

    @precondition(lambda self: set(self.owners.values()) - {TREE})
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        requests = sorted(slot for slot, owner in self.owners.items() if isinstance(owner, int))
        slot = data.draw(st.sampled_from(requests))
        owner = self.owners[slot]
        assert isinstance(owner, int)
        self.slots.give_to_tree(slot, owner)
        self.owners[slot] = TREE

    @rule(slot=st.integers(0, SIZE - 1), owner=st.integers(0, 5) | st.just(TREE))
    def free_what_belongs_to_another(self, slot: int, owner: Owner) -> None:
        if self.owners.get(slot) != owner:
            with pytest.raises(AssertionError, match="belongs to"):
                self.slots.free(slot, owner)

    @rule(slot=st.integers(0, SIZE - 1), request=st.integers(0, 5))
    def give_what_belongs_to_another(self, slot: int, request: int) -> None:
        if self.owners.get(slot) != request:
            with pytest.raises(AssertionError, match="belongs to"):
                self.slots.give_to_tree(slot, request)

    @invariant()
    def counts_agree(self) -> None:
        self.slots.check()
        of_tree = [slot for slot, owner in self.owners.items() if owner is TREE]
        assert self.slots.free_slots == SIZE - len(self.owners)
        assert self.slots.tree_slots == len(of_tree)
        assert self.slots.request_slots == len(self.owners) - len(of_tree)
        assert self.slots.owned_by(TREE) == set(of_tree)


TestAuxiliarySlots = AuxiliarySlotsMachine.TestCase


def test_of_four_slots_three_allocations_differ_and_freeing_two_leaves_three() -> None:
    slots = AuxiliarySlots(4)
    first, second = slots.alloc(7), slots.alloc(8)
    assert first is not None and second is not None
    third = slots.alloc(8)
    assert len({first, second, third}) == 3
    slots.free(first, 7)
    slots.free(second, 8)
    assert slots.free_slots == 3


def test_slots_count_from_zero_and_the_lowest_goes_first() -> None:
    slots = AuxiliarySlots(2)
    assert [slots.alloc(1), slots.alloc(1), slots.alloc(1)] == [0, 1, None]


def test_a_tracked_slot_is_kept_while_the_live_one_is_freed() -> None:
    slots = AuxiliarySlots(2)
    live, tracked = slots.alloc(7), slots.alloc(7)
    assert live is not None and tracked is not None
    slots.give_to_tree(tracked, 7)
    slots.free(live, 7)
    assert slots.owned_by(TREE) == {tracked}
    assert (slots.free_slots, slots.request_slots, slots.tree_slots) == (1, 0, 1)


def test_what_a_request_gave_to_the_tree_stays_until_the_tree_frees_it() -> None:
    slots = AuxiliarySlots(1)
    slot = slots.alloc(7)
    assert slot is not None
    slots.give_to_tree(slot, 7)
    with pytest.raises(AssertionError, match="belongs to the prefix tree, not to request 7"):
        slots.free(slot, 7)
    assert slots.alloc(8) is None
    slots.free(slot, TREE)
    assert slots.free_slots == 1


def test_two_releases_of_one_slot_are_an_assertion_and_free_it_once() -> None:
    slots = AuxiliarySlots(2)
    slot = slots.alloc(7)
    assert slot is not None
    slots.free(slot, 7)
    with pytest.raises(AssertionError, match="belongs to no owner"):
        slots.free(slot, 7)
    assert slots.free_slots == 2


def test_a_stale_release_does_not_free_the_slot_of_its_next_owner() -> None:
    slots = AuxiliarySlots(1)
    slot = slots.alloc(7)
    assert slot is not None
    slots.free(slot, 7)
    assert slots.alloc(8) == slot
    with pytest.raises(AssertionError, match="belongs to request 8, not to request 7"):
        slots.free(slot, 7)


def test_a_model_without_states_has_an_empty_pool() -> None:
    slots = AuxiliarySlots(0)
    assert slots.alloc(1) is None
    slots.check()
