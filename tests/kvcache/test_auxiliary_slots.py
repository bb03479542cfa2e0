import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.kvcache.auxiliary_slots import AuxiliarySlots

SIZE = 4


class AuxiliarySlotsMachine(RuleBasedStateMachine):
    """Against a plain dictionary of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AuxiliarySlots(SIZE)
        self.owners: dict[int, int] = {}

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

    @rule(slot=st.integers(0, SIZE - 1), request=st.integers(0, 5))
    def free_what_belongs_to_another(self, slot: int, request: int) -> None:
        if self.owners.get(slot) != request:
            with pytest.raises(AssertionError, match="belongs to"):
                self.slots.free(slot, request)

    @invariant()
    def counts_agree(self) -> None:
        self.slots.check()
        assert self.slots.free_slots == SIZE - len(self.owners)


TestAuxiliarySlots = AuxiliarySlotsMachine.TestCase


def test_two_releases_of_one_slot_are_an_assertion_and_free_it_once() -> None:
    slots = AuxiliarySlots(2)
    slot = slots.alloc(7)
    assert slot is not None
    slots.free(slot, 7)
    with pytest.raises(AssertionError, match="belongs to None"):
        slots.free(slot, 7)
    assert slots.free_slots == 2


def test_a_stale_release_does_not_free_the_slot_of_its_next_owner() -> None:
    slots = AuxiliarySlots(1)
    slot = slots.alloc(7)
    assert slot is not None
    slots.free(slot, 7)
    assert slots.alloc(8) == slot
    with pytest.raises(AssertionError, match="belongs to 8, not to request 7"):
        slots.free(slot, 7)


def test_a_model_without_states_has_an_empty_pool() -> None:
    slots = AuxiliarySlots(0)
    assert slots.alloc(1) is None
    slots.check()
