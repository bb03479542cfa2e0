"""Rows of a batch: their memory, their leftovers, and which may join."""

import gc
import weakref

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_batch import KVBatch
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.kv_row import LayerKV
from tests.support.batches.kv_model import expect_content, run_step
from tests.support.batches.kv_reference import (
    KEY_DIM,
    KV_HEADS,
    LAYERS,
    MIXED,
    PLAIN,
    VALUE_DIM,
    own_caches,
    random_row,
)

pytestmark = pytest.mark.mlx


def test_an_empty_batch_holds_no_memory():
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, BatchForm(split=True), min_width=2, slab_tokens=8)
    for key in range(5):
        batch.join(key, random_row(rng, key).content(), length=key, room=key)
    assert batch.nbytes > 0
    for key in (2, 0, 4, 1, 3):
        batch.leave(key)
    batch.check()
    assert (batch.nbytes, batch.used_tokens) == (0, 0)


@pytest.mark.parametrize("windows", [PLAIN, MIXED])
@pytest.mark.parametrize("split", [True, False])
def test_what_is_not_a_number_does_not_outlive_its_request(split, windows):
    rng = np.random.default_rng(1)
    batch = KVBatch(windows, BatchForm(split=split), min_width=8, slab_tokens=64)
    rows = {0: random_row(rng, 5, windows), 1: random_row(rng, 2, windows)}
    sick = random_row(rng, 7, windows)
    for keys, values in sick.layers:
        keys[:] = np.nan
        values[:] = np.inf
    for key, row in (*rows.items(), (2, sick)):
        batch.join(key, row.content(), length=row.length, room=8)
    batch.leave(2)
    rows[3] = random_row(rng, 1, windows)
    batch.join(3, rows[3].content(), length=1, room=8)
    run_step(batch, rows, rng)


@pytest.mark.parametrize("windows", [PLAIN, MIXED])
def test_a_sick_row_is_wiped_when_another_moves_into_its_place(windows):
    rng = np.random.default_rng(1)
    batch = KVBatch(windows, BatchForm(split=True), min_width=8, slab_tokens=64)
    sick = random_row(rng, 7, windows)
    for keys, values in sick.layers:
        keys[:] = np.nan
        values[:] = np.nan
    rows = {1: random_row(rng, 5, windows), 2: random_row(rng, 1, windows)}
    for key, row in ((0, sick), *rows.items()):
        batch.join(key, row.content(), length=row.length, room=8)
    batch.leave(0)
    run_step(batch, rows, rng)


@pytest.mark.parametrize(
    ("spare_rows", "held_rows"),
    [(None, [1, 2, 4, 4, 8]), (0, [1, 2, 3, 4, 5]), (3, [1, 2, 3, 4, 5]), (4, [1, 2, 4, 4, 5])],
)
def test_a_slab_doubles_as_long_as_that_fits_in_what_is_spare(spare_rows, held_rows):
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, BatchForm(split=False), min_width=8)
    row_nbytes = LAYERS * KV_HEADS * 8 * (KEY_DIM + VALUE_DIM) * 4
    batch.spare_nbytes = None if spare_rows is None else spare_rows * row_nbytes
    found = []
    for key in range(5):
        batch.join(key, random_row(rng, 3).content(), length=3, room=8)
        found.append(batch.nbytes // row_nbytes)
    assert found == held_rows


def test_the_same_row_cannot_join_twice():
    batch = KVBatch(PLAIN, BatchForm(split=True))
    row = random_row(np.random.default_rng(1), 3)
    batch.join(1, row.content(), length=3, room=3)
    with pytest.raises(AssertionError, match="row 1 is here already"):
        batch.join(1, row.content(), length=3, room=3)


def test_offsets_are_a_new_array_each_step():
    # Model code keeps the old one past the update, so it must not change underneath.
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, BatchForm(split=True))
    rows = {1: random_row(rng, 1), 2: random_row(rng, 2)}
    for key, row in rows.items():
        batch.join(key, row.content(), length=row.length, room=8)
    run_step(batch, rows, rng)
    kept = batch.caches[0].offset
    assert sorted(kept.tolist()) == [1, 2]
    run_step(batch, rows, rng)
    assert sorted(kept.tolist()) == [1, 2]
    assert sorted(batch.caches[0].offset.tolist()) == [2, 3]


def test_a_cache_is_true_whatever_it_holds():
    # Models ask "if cache": one that says no would lose its mask in silence.
    assert all(KVBatch(PLAIN, BatchForm(split=True)).caches)
    assert mx.array(KVBatch(PLAIN, BatchForm(split=True)).caches[0].offset).size == 0


@pytest.mark.parametrize(
    ("length", "width"), [(3, 4), (5, 8), (63, 64), (64, 72), (71, 72), (130, 144), (250, 256)]
)
def test_a_row_with_a_slab_of_its_own_has_little_more_room_than_it_needs(length, width):
    batch = KVBatch(PLAIN, BatchForm(split=True), min_width=4, slab_tokens=64)
    row = random_row(np.random.default_rng(1), length)
    batch.join(1, row.content(), length=length, room=length)
    per_token = LAYERS * KV_HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert batch.nbytes == width * per_token


def test_rows_of_odd_widths_come_grow_and_go():
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, BatchForm(split=True), min_width=4, slab_tokens=64)
    rows = {key: random_row(rng, length) for key, length in enumerate((70, 71, 72, 66, 130, 3))}
    for key, row in rows.items():
        batch.join(key, row.content(), length=row.length, room=row.length)
    for gone in (2, 0, 4):
        for _ in range(9):
            run_step(batch, rows, rng)
            batch.check()
            expect_content(batch, rows)
        batch.leave(gone)
        del rows[gone]
        batch.check()
        expect_content(batch, rows)


def test_chunks_kv_is_let_go_with_their_step():
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, BatchForm(split=True))
    batch.join(1, random_row(rng, 3).content(), length=3, room=8)
    chunks = [own_caches(PLAIN) for _ in range(2)]
    held = [weakref.ref(caches[0]) for caches in chunks]
    batch.begin_step([MixedChunk(caches, position=0, num_tokens=2) for caches in chunks])
    for cache in batch.caches:
        keys, values = (mx.ones((5, KV_HEADS, 1, dim)) for dim in (KEY_DIM, VALUE_DIM))
        fetched = LayerKV(*cache.update_and_fetch(keys, values))
        cache.attend(mx.ones((5, KV_HEADS, 1, KEY_DIM)), fetched, scale=1.0, sinks=None)
    batch.end_step()
    del chunks, cache
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def prepared(spare: int | None, *, leave: bool = False, set_aside: int = 0) -> float:
    """What a batch of two rows grows to by preparing a third, over what it was."""
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, BatchForm(split=True), min_width=8, slab_tokens=64)
    for key in range(2):
        batch.join(key, random_row(rng, 3).content(), length=3, room=8)
    held = batch.nbytes
    batch.spare_nbytes = None if spare is None else held + spare
    if leave:
        batch.leave(1)
    batch.prepare(99, 1.0, set_aside=set_aside)
    assert batch.nbytes == held
    batch.prepare(8, 1.0, set_aside=set_aside)
    assert batch.spare_nbytes is None or batch.spare_nbytes >= 0
    return batch.nbytes / held


def test_room_is_prepared_where_a_row_would_lack_it_and_there_is_memory_to_spare():
    assert prepared(None) == 2.0
    assert prepared(0) == 2.0
    assert prepared(-1) == 1.0
    assert (prepared(9, set_aside=9), prepared(9, set_aside=10)) == (2.0, 1.0)
    assert prepared(None, leave=True) == 1.0
