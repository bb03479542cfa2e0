"""The write positions and masks of a step's tokens in a slab, for layers of any window."""

import pytest

pytest.importorskip("mlx.core")

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.kvcache.batch.slab_step import SlabStep
from tests.support.batches.kv_model import expect_place

pytestmark = pytest.mark.mlx


def test_rows_at_1_and_2_tokens_write_there_and_look_at_2_and_3():
    step = SlabStep(5, (1, 2))
    place = step.place(None)
    assert (step.start, step.end, place.visible) == (5, 7, 3)
    assert place.position is None
    assert place.positions is not None and place.positions.tolist() == [1, 2]
    assert place.mask is not None
    assert place.mask[:, 0, 0].tolist() == [[True, True, False], [True, True, True]]


def test_rows_of_equal_length_need_no_mask():
    place = SlabStep(0, (2, 2)).place(None)
    assert (place.position, place.mask) == (2, None)


def test_full_windows_need_no_mask_though_their_rows_write_at_different_places():
    place = SlabStep(0, (5, 7)).place(4)
    assert place.visible == 4
    assert place.positions is not None and place.positions.tolist() == [1, 3]
    assert place.mask is None


def test_full_windows_whose_lengths_differ_by_whole_turns_write_at_one_place():
    place = SlabStep(0, (5, 9, 13)).place(4)
    assert (place.position, place.positions, place.mask) == (1, None, None)


def test_equal_places_with_unequal_lengths_are_masked_while_a_window_is_not_full():
    # One row's first token, and one that begins a new turn: both at place 0.
    place = SlabStep(0, (0, 4)).place(4)
    assert place.position is None
    assert place.positions is not None and place.positions.tolist() == [0, 0]
    assert place.mask is not None
    assert place.mask[:, 0, 0].tolist() == [[True, False, False, False], [True] * 4]


def test_the_token_that_fills_a_window_makes_it_need_no_mask():
    assert SlabStep(0, (3, 9)).place(4).mask is None
    assert SlabStep(0, (2, 9)).place(4).mask is not None


def test_the_last_tokens_of_a_ring_are_found_across_its_seam():
    recent = SlabStep(0, (9, 4)).recent(4, 3)
    assert recent is not None
    assert recent[:, 0, 0].tolist() == [[True, True, False, True], [True, False, True, True]]


def test_layers_of_one_window_share_their_arrays():
    step = SlabStep(0, (1, 2))
    assert step.place(3) is step.place(3)
    assert step.place(3) is not step.place(None)
    assert step.indices is step.indices


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 12),
)
def test_any_rows_write_and_look_as_a_ring_would(lengths, window):
    expect_place(SlabStep(0, tuple(lengths)), window)
