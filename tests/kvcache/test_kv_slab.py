"""Rows of one width: packed, written at their own positions, grown by doubling."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from kv_reference import (
    KEY_DIM,
    KV_HEADS,
    LAYERS,
    VALUE_DIM,
    PlainRow,
    expect_rectangle,
    random_row,
)

from mlx_dp.kvcache.kv_row import KVRow, LayerKV
from mlx_dp.kvcache.kv_slab import KVSlab

pytestmark = pytest.mark.mlx


def slab_of(*rows: PlainRow, width: int = 8, max_rows: int = 8) -> KVSlab:
    slab = KVSlab(width, max_rows)
    for key, row in enumerate(rows):
        slab.append(KVRow(key, row.length), row.content())
    return slab


def write_token(slab: KVSlab, rows: list[PlainRow], rng: np.random.Generator) -> None:
    """Write one token a row in every layer; what each may see must be its own tokens."""
    step = slab.begin_step(0)
    for layer in range(LAYERS):
        keys, values = (
            rng.standard_normal((len(rows), KV_HEADS, 1, dim), dtype=np.float32)
            for dim in (KEY_DIM, VALUE_DIM)
        )
        seen = slab.write(layer, step, LayerKV(mx.array(keys), mx.array(values)))
        for index, row in enumerate(rows):
            row.append(layer, keys[index], values[index])
        assert seen.keys.shape == (len(rows), KV_HEADS, step.visible, KEY_DIM)
        assert seen.values.shape == (len(rows), KV_HEADS, step.visible, VALUE_DIM)
        expect_rectangle(seen, rows, layer)


@pytest.mark.parametrize("lengths", [(3,), (3, 3), (1, 2), (0, 5, 2), (7, 0)])
def test_each_row_is_written_at_its_own_position(lengths):
    rng = np.random.default_rng(3)
    rows = [random_row(rng, length) for length in lengths]
    slab = slab_of(*rows)
    while slab.longest < slab.width:
        write_token(slab, rows, rng)


def test_rows_at_1_and_2_tokens_write_there_and_look_at_2_and_3():
    rng = np.random.default_rng(3)
    step = slab_of(random_row(rng, 1), random_row(rng, 2)).begin_step(5)
    assert (step.start, step.end, step.visible) == (5, 7, 3)
    assert step.position is None
    assert step.positions is not None and step.positions.tolist() == [1, 2]
    assert step.mask is not None
    assert step.mask[:, 0, 0].tolist() == [[True, True, False], [True, True, True]]


def test_rows_of_equal_length_need_no_mask():
    rng = np.random.default_rng(3)
    step = slab_of(random_row(rng, 2), random_row(rng, 2)).begin_step(0)
    assert (step.position, step.mask) == (2, None)


def test_a_row_cannot_be_written_past_its_width():
    rng = np.random.default_rng(3)
    slab = slab_of(random_row(rng, 2), random_row(rng, 8))
    with pytest.raises(AssertionError):
        slab.begin_step(0)


def test_buffers_double_up_to_the_most_rows():
    rng = np.random.default_rng(3)
    slab = KVSlab(8, 6)
    row_nbytes = LAYERS * KV_HEADS * 8 * (KEY_DIM + VALUE_DIM) * 4
    held = []
    for key in range(6):
        row = random_row(rng, 1)
        slab.append(KVRow(key, 1), row.content())
        held.append(slab.nbytes // row_nbytes)
    assert held == [1, 2, 4, 4, 6, 6]
    assert slab.full


def test_widening_keeps_every_row():
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 8), random_row(rng, 3)]
    slab = slab_of(*rows)
    slab.widen(16)
    write_token(slab, rows, rng)
    assert slab.width == 16


def test_a_replaced_row_leaves_nothing_behind():
    rng = np.random.default_rng(3)
    rows = [random_row(rng, 7), random_row(rng, 2), random_row(rng, 4)]
    slab = slab_of(*rows)
    slab.replace(0, KVRow(2, 4), slab.content(2))
    slab.pop()
    kept = [rows[2], rows[1]]
    write_token(slab, kept, rng)
    # The row that comes to the place of the popped one finds nothing of it either.
    newcomer = random_row(rng, 0)
    slab.append(KVRow(3, 0), newcomer.content())
    write_token(slab, [*kept, newcomer], rng)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_rows_keep_the_dtype_of_what_joins(dtype):
    rng = np.random.default_rng(3)
    slab = KVSlab(8, 8)
    for key in range(2):
        content = [
            LayerKV(kv.keys.astype(dtype), kv.values.astype(dtype))
            for kv in random_row(rng, 2).content()
        ]
        slab.append(KVRow(key, 2), content)
    assert {array.dtype for kv in slab.content(1) for array in kv} == {dtype}
