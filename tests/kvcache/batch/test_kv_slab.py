"""Rows of one width: packed, written at their own positions, grown by doubling."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.kv_slab import KVSlab
from mlx_dp.kvcache.kv_row import KVRow, LayerKV
from tests.support.batches.kv_model import expect_place, expect_rectangle
from tests.support.batches.kv_reference import (
    KEY_DIM,
    KV_HEADS,
    MIXED,
    PLAIN,
    VALUE_DIM,
    PlainRow,
    random_row,
)

pytestmark = pytest.mark.mlx


def slab_of(*rows: PlainRow, width: int = 8, max_rows: int = 8) -> KVSlab:
    slab = KVSlab(width, max_rows, rows[0].windows)
    for key, row in enumerate(rows):
        slab.append(KVRow(key, row.length), row.content(), spare=True)
    return slab


def write_token(slab: KVSlab, rows: list[PlainRow], rng: np.random.Generator) -> None:
    """Write a token per row in every layer; each row must attend to exactly its own tokens."""
    step = slab.begin_step(0)
    for layer, window in enumerate(rows[0].windows):
        keys, values = (
            rng.standard_normal((len(rows), KV_HEADS, 1, dim), dtype=np.float32)
            for dim in (KEY_DIM, VALUE_DIM)
        )
        (seen,) = slab.write(layer, step, LayerKV(mx.array(keys), mx.array(values)))
        for index, row in enumerate(rows):
            row.append(layer, keys[index], values[index])
        visible = step.place(window).visible
        assert seen.keys.shape == (len(rows), KV_HEADS, visible, KEY_DIM)
        assert seen.values.shape == (len(rows), KV_HEADS, visible, VALUE_DIM)
        expect_place(step, window)
        expect_rectangle(seen, rows, layer)


def nbytes_of(windows: Sequence[int | None], width: int) -> int:
    """Bytes of one row's buffers."""
    kept = sum(width if window is None else min(window, width) for window in windows)
    return kept * KV_HEADS * (KEY_DIM + VALUE_DIM) * 4


@pytest.mark.parametrize("windows", [PLAIN, MIXED])
@pytest.mark.parametrize("lengths", [(3,), (3, 3), (1, 2), (0, 5, 2), (7, 0), (1, 4, 7)])
def test_each_row_is_written_at_its_own_position(lengths, windows):
    rng = np.random.default_rng(3)
    rows = [random_row(rng, length, windows) for length in lengths]
    slab = slab_of(*rows)
    while slab.longest < slab.width:
        write_token(slab, rows, rng)


def test_a_row_cannot_be_written_past_its_width():
    rng = np.random.default_rng(3)
    slab = slab_of(random_row(rng, 2), random_row(rng, 8))
    with pytest.raises(AssertionError):
        slab.begin_step(0)


def test_buffers_double_up_to_the_most_rows():
    rng = np.random.default_rng(3)
    slab = KVSlab(8, 6, PLAIN)
    held = []
    for key in range(6):
        slab.append(KVRow(key, 1), random_row(rng, 1).content(), spare=True)
        held.append(slab.nbytes // nbytes_of(PLAIN, 8))
    assert held == [1, 2, 4, 4, 6, 6]
    assert slab.full


def test_without_spare_room_buffers_grow_row_by_row():
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 1 + key, MIXED) for key in range(4)]
    slab = KVSlab(8, 6, MIXED)
    for key, row in enumerate(rows):
        slab.append(KVRow(key, row.length), row.content(), spare=False)
        assert slab.held_rows == key + 1
        assert slab.nbytes == (key + 1) * nbytes_of(MIXED, 8)
    write_token(slab, rows, rng)


def test_shrinking_gives_back_the_rows_that_are_not_there():
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 4, MIXED) for _ in range(3)]
    slab = slab_of(*rows)
    assert slab.held_rows == 4
    slab.pop()
    slab.shrink()
    assert (slab.held_rows, slab.nbytes) == (2, 2 * nbytes_of(MIXED, 8))
    # The KV of the popped row went with its memory.
    newcomer = random_row(rng, 0, MIXED)
    slab.append(KVRow(3, 0), newcomer.content(), spare=True)
    write_token(slab, [*rows[:2], newcomer], rng)


def test_a_window_takes_no_more_room_than_it_keeps():
    rng = np.random.default_rng(3)
    slab = slab_of(random_row(rng, 9, (2, 100)), width=16)
    assert slab.nbytes == (2 + 16) * KV_HEADS * (KEY_DIM + VALUE_DIM) * 4


@pytest.mark.parametrize("windows", [PLAIN, MIXED])
@pytest.mark.parametrize("width", [4, 8])
def test_widening_keeps_every_row(width, windows):
    # With rows whose windows are full, rows whose are not, and a window wider than the slab.
    rng = np.random.default_rng(3)
    rows = [random_row(rng, length, windows) for length in (width, 3, 2)]
    slab = slab_of(*rows, width=width)
    slab.widen(2 * width)
    assert slab.width == 2 * width
    assert slab.nbytes == slab.held_rows * nbytes_of(windows, 2 * width)
    for _ in range(width):
        write_token(slab, rows, rng)


@pytest.mark.parametrize("windows", [PLAIN, MIXED])
def test_a_replaced_row_leaves_nothing_behind(windows):
    rng = np.random.default_rng(3)
    rows = [random_row(rng, length, windows) for length in (7, 2, 4)]
    slab = slab_of(*rows)
    slab.replace(0, KVRow(2, 4), slab.content(2))
    slab.pop()
    kept = [rows[2], rows[1]]
    write_token(slab, kept, rng)
    # The row that moves to the popped row's place finds none of its KV either.
    newcomer = random_row(rng, 0, windows)
    slab.append(KVRow(3, 0), newcomer.content(), spare=True)
    write_token(slab, [*kept, newcomer], rng)


def test_views_are_of_the_tokens_asked_for_and_of_all_that_a_window_keeps():
    rng = np.random.default_rng(3)
    row = random_row(rng, 7, MIXED)
    whole, six, three = slab_of(random_row(rng, 2, MIXED), row).views(1, 2, 5)
    np.testing.assert_array_equal(np.array(whole.keys[0]), row.layers[0][0][:, 2:5])
    assert six.keys.shape[2] == 5
    np.testing.assert_array_equal(np.array(three.values[0]), row.ring(2)[1])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_rows_keep_the_dtype_of_what_joins(dtype):
    rng = np.random.default_rng(3)
    slab = KVSlab(8, 8, PLAIN)
    for key in range(2):
        content = [
            LayerKV(kv.keys.astype(dtype), kv.values.astype(dtype))
            for kv in random_row(rng, 2).content()
        ]
        slab.append(KVRow(key, 2), content, spare=True)
    assert {array.dtype for kv in slab.content(1) for array in kv} == {dtype}
