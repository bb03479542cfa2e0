"""The one budget, with numbers in place of an engine and a cache."""

import pytest

from mlx_dp.worker.scheduling.memory_room import MemoryRoom


class Memory:
    """An engine that holds ``rows``, ``slack`` that compacting releases, and cached leaves."""

    def __init__(self, *, rows: int = 0, slack: int = 0, leaves: tuple[int, ...] = ()) -> None:
        self.rows = rows
        self.slack = slack
        self.leaves = list(leaves)
        self.growth = 0
        self.compacted = 0

    @property
    def held_nbytes(self) -> int:
        return self.rows + self.slack + sum(self.leaves)

    @property
    def held_buffers(self) -> int:
        return 10 + 2 * len(self.leaves)

    @property
    def row_buffers(self) -> int:
        return 4

    def growth_nbytes(self) -> int:
        return self.growth

    def compact(self) -> None:
        self.compacted += 1
        self.slack = 0

    @property
    def nbytes(self) -> int:
        return sum(self.leaves)

    def evict(self) -> bool:
        if not self.leaves:
            return False
        self.leaves.pop(0)
        return True


def room(memory: Memory, budget: int | None = 100) -> MemoryRoom:
    return MemoryRoom(memory, memory, budget)


def test_what_fits_is_taken_to_the_last_byte() -> None:
    memory = Memory(rows=60)
    memory.growth = 10
    assert room(memory).try_evict_for(30)
    assert not room(memory).try_evict_for(31)


def test_leaves_are_evicted_until_it_fits_and_no_further() -> None:
    memory = Memory(rows=50, leaves=(11, 10, 9))
    assert room(memory).try_evict_for(35)
    assert memory.leaves == [9]


def test_nothing_is_evicted_where_that_would_not_do() -> None:
    memory = Memory(rows=80, leaves=(10,))
    assert not room(memory).try_evict_for(21)
    assert memory.leaves == [10]


def test_compacting_comes_after_evicting_and_only_if_a_row_left() -> None:
    memory = Memory(rows=50, slack=30, leaves=(10,))
    tight = room(memory)
    assert not tight.try_make_room(40)
    assert memory.compacted == 0
    tight.row_left(1)
    assert tight.try_make_room(10)
    assert (memory.compacted, memory.leaves) == (0, [10])
    assert tight.try_make_room(40)
    assert (memory.compacted, memory.leaves) == (1, [10])
    assert not tight.try_make_room(80)
    assert memory.compacted == 1


def test_rows_to_come_count_until_their_step_is_launched() -> None:
    memory = Memory()
    kept = room(memory)
    kept.expect_row(1, 60)
    assert not kept.try_evict_for(41)
    kept.row_joins(1)
    assert not kept.try_evict_for(41)
    memory.rows = 60
    kept.step_launched()
    assert kept.try_evict_for(40)
    assert not kept.try_evict_for(41)
    kept.check()


def test_a_row_that_never_came_is_given_back() -> None:
    kept = room(Memory())
    kept.expect_row(1, 60)
    kept.row_left(1)
    assert kept.try_evict_for(100)
    kept.row_left(2)
    kept.check()


def test_a_request_does_not_expect_two_rows() -> None:
    kept = room(Memory())
    kept.expect_row(1, 6)
    with pytest.raises(AssertionError, match="request 1"):
        kept.expect_row(1, 6)


def test_copies_are_promised_until_their_step_is_launched() -> None:
    kept = room(Memory())
    kept.promise(70)
    assert not kept.try_evict_for(31)
    kept.step_launched()
    assert kept.try_evict_for(100)


def test_the_last_request_gets_all_that_can_be_evicted_and_no_more_than_it_needs() -> None:
    memory = Memory(rows=95, leaves=(10, 10, 10))
    memory.growth = 10
    room(memory).evict_excess()
    assert memory.leaves == []
    ample = Memory(rows=75, leaves=(10, 10, 10))
    room(ample).evict_excess()
    assert ample.leaves == [10, 10]


def test_at_rest_much_slack_is_given_back_and_little_is_not() -> None:
    much, little = Memory(slack=60), Memory(slack=40)
    for memory in (much, little):
        kept = room(memory)
        kept.idle()
        assert memory.compacted == 0
        kept.row_left(1)
        kept.idle()
    assert (much.compacted, little.compacted) == (1, 0)


def test_without_a_budget_everything_fits() -> None:
    memory = Memory(rows=10**12, leaves=(10,))
    endless = room(memory, None)
    assert endless.try_make_room(10**12)
    endless.row_left(1)
    endless.idle()
    assert (memory.leaves, memory.compacted) == ([10], 0)


def test_what_is_held_what_grows_and_what_is_promised_is_accounted_for() -> None:
    memory = Memory(rows=50, leaves=(10,))
    memory.growth = 5
    owner = room(memory)
    owner.expect_row(1, 20)
    owner.promise(3)
    assert owner.accounted_nbytes == 50 + 10 + 5 + 20 + 3
    owner.row_joins(1)
    owner.step_launched()
    assert owner.accounted_nbytes == 50 + 10 + 5


def test_leaves_are_evicted_until_one_more_row_fits_into_the_buffers_of_the_device() -> None:
    memory = Memory(leaves=(1,) * 9)
    room = MemoryRoom(memory, memory, 100, buffer_limit=24)
    assert room.try_evict_for(1)
    assert memory.leaves == [1] * 5
    assert memory.held_buffers + memory.row_buffers == 24


def test_without_leaves_to_evict_a_crowded_device_refuses_whatever_the_bytes_are() -> None:
    memory = Memory()
    assert not MemoryRoom(memory, memory, None, buffer_limit=13).try_evict_for(0)
    assert MemoryRoom(memory, memory, None, buffer_limit=14).try_evict_for(0)
