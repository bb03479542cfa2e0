import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.kvcache.slots.request_slots import RequestSlots

SIZE = 5


class RequestSlotsMachine(RuleBasedStateMachine):
    """Against a plain set of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = RequestSlots(SIZE)
        self.held: set[int] = set()

    @rule()
    def alloc(self) -> None:
        slot = self.slots.alloc()
        idle = set(range(SIZE)) - self.held
        assert slot == min(idle, default=None)
        if slot is not None:
            self.held.add(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.slots.free(slot)
        self.held.remove(slot)

    @rule(slot=st.integers(-1, SIZE))
    def free_what_is_not_held(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(AssertionError, match="not held"):
                self.slots.free(slot)

    @invariant()
    def counts_agree(self) -> None:
        self.slots.check()
        assert self.slots.free_slots == SIZE - len(self.held)


TestRequestSlots = RequestSlotsMachine.TestCase


def test_two_allocations_are_distinct_and_the_lowest_first() -> None:
    slots = RequestSlots(3)
    assert [slots.alloc(), slots.alloc(), slots.alloc(), slots.alloc()] == [0, 1, 2, None]
    slots.free(2)
    slots.free(0)
    assert slots.alloc() == 0


def test_a_slot_is_never_freed_twice() -> None:
    slots = RequestSlots(2)
    slot = slots.alloc()
    assert slot is not None
    slots.free(slot)
    with pytest.raises(AssertionError, match="slot 0 of 2 is not held"):
        slots.free(slot)
