"""Every request finds its own state in its own row, in any order of rows."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models.cache import ArraysCache

from mlx_dp.kvcache.batch.state_rows import StateRows
from mlx_dp.kvcache.kinds import LeafArrays

pytestmark = pytest.mark.mlx

SHAPES = (((3, 4), (2, 2, 2)), ((5,),))
"""Two leaves, of two arrays and of one."""
ROW_NBYTES = sum(int(np.prod(shape)) for leaf in SHAPES for shape in leaf) * 4

PlainState = list[list[np.ndarray]]


def random_state(rng: np.random.Generator) -> PlainState:
    return [[rng.standard_normal(shape, dtype=np.float32) for shape in leaf] for leaf in SHAPES]


def as_arrays(state: PlainState) -> list[LeafArrays]:
    return [tuple(mx.array(array[None]) for array in leaf) for leaf in state]


def expect_state(found: list[LeafArrays], state: PlainState) -> None:
    for leaf, expected in zip(found, state, strict=True):
        for array, own in zip(leaf, expected, strict=True):
            np.testing.assert_array_equal(np.array(array), own[None])


def rows_with(*states: PlainState) -> StateRows:
    """These states under the keys 0, 1 ..., not arranged yet."""
    rows = StateRows([len(leaf) for leaf in SHAPES])
    for key, state in enumerate(states):
        rows.join(key, as_arrays(state))
    return rows


class StateMachine(RuleBasedStateMachine):
    """Joins, leaves, steps in any order of rows, and snapshots, in any order of events."""

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = rows_with()
        self.states: dict[int, PlainState] = {}
        self.copies: list[tuple[list[LeafArrays], PlainState]] = []
        self.next_key = 0

    @rule()
    def join(self) -> None:
        self.states[self.next_key] = random_state(self.rng)
        self.rows.join(self.next_key, as_arrays(self.states[self.next_key]))
        self.next_key += 1

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.states)))
        self.rows.leave(key)
        del self.states[key]

    @precondition(lambda self: self.states)
    @rule(data=st.data(), in_place=st.booleans())
    def step(self, data: st.DataObject, in_place: bool) -> None:
        """A model makes every state anew, or writes into the existing one."""
        order = tuple(data.draw(st.permutations(sorted(self.states))))
        self.rows.arrange(order)
        for leaf, cache in enumerate(self.rows.caches):
            for index, array in enumerate(cache.cache):
                assert array.shape == (len(order), *SHAPES[leaf][index])
                more = self.rng.standard_normal(array.shape, dtype=np.float32)
                for row, key in enumerate(order):
                    self.states[key][leaf][index] = self.states[key][leaf][index] + more[row]
                if in_place:
                    array[:] = array + mx.array(more)
                else:
                    cache[index] = array + mx.array(more)
        assert self.rows.nbytes == len(order) * ROW_NBYTES

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.states)))
        state = [[array.copy() for array in leaf] for leaf in self.states[key]]
        self.copies.append((self.rows.content(key), state))

    @rule()
    def compact(self) -> None:
        self.rows.compact()
        assert self.rows.nbytes == len(self.states) * ROW_NBYTES

    @invariant()
    def all_is_as_written(self) -> None:
        if not hasattr(self, "rows"):
            return
        for key, state in self.states.items():
            expect_state(self.rows.content(key), state)
        for found, state in self.copies:
            expect_state(found, state)
        assert self.states or self.rows.nbytes == 0


def test_every_row_keeps_its_own_state_while_others_join_leave_or_move():
    run_state_machine_as_test(
        StateMachine,
        settings=settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True),
    )


def test_a_layer_sees_one_call_of_batch_width():
    rng = np.random.default_rng(1)
    rows = rows_with(random_state(rng), random_state(rng))
    rows.arrange((1, 0))
    assert [array.shape for array in rows.caches[0].cache] == [(2, 3, 4), (2, 2, 2, 2)]


def test_before_its_first_arrangement_a_row_is_counted_and_can_be_read():
    rng = np.random.default_rng(1)
    states = [random_state(rng), random_state(rng)]
    rows = rows_with(*states)
    assert rows.nbytes == 2 * ROW_NBYTES
    expect_state(rows.content(1), states[1])
    rows.leave(0)
    assert rows.nbytes == ROW_NBYTES


def test_the_same_order_again_moves_nothing():
    rng = np.random.default_rng(1)
    rows = rows_with(random_state(rng), random_state(rng))
    rows.arrange((0, 1))
    before = rows.arrays()
    rows.arrange((0, 1))
    assert [now is then for now, then in zip(rows.arrays(), before, strict=True)] == [True] * 3


def test_the_last_row_that_leaves_takes_its_memory_with_it():
    rng = np.random.default_rng(1)
    rows = rows_with(random_state(rng), random_state(rng))
    rows.arrange((0, 1))
    rows.leave(1)
    rows.leave(0)
    assert (rows.nbytes, rows.arrays()) == (0, [])
    rows.join(2, as_arrays(random_state(rng)))
    rows.arrange((2,))
    assert rows.nbytes == ROW_NBYTES


def test_one_row_has_one_place():
    rng = np.random.default_rng(1)
    rows = rows_with(random_state(rng))
    for _ in range(2):
        with pytest.raises(AssertionError, match="row 0 is here already"):
            rows.join(0, as_arrays(random_state(rng)))
        rows.arrange((0,))
    with pytest.raises(AssertionError):
        rows.arrange((0, 1))
    rows.join(1, as_arrays(random_state(rng)))
    rows.arrange((0, 1))
    rows.leave(0)
    with pytest.raises(AssertionError, match="row 0 is not here"):
        rows.content(0)


def test_a_batch_of_states_pads_and_masks_nothing():
    rng = np.random.default_rng(1)
    rows = rows_with(random_state(rng), random_state(rng))
    rows.arrange((0, 1))
    cache = rows.caches[0]
    before = list(cache.cache)
    assert isinstance(cache, ArraysCache)
    assert cache.make_mask(1) is None
    cache.advance(1)
    assert (cache.lengths, cache.left_padding) == (None, None)
    assert [now is then for now, then in zip(cache.cache, before, strict=True)] == [True, True]
