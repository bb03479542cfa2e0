"""Rows of KV, windows and states come, go and change places together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_dp.kvcache.batch.batch_caches import BatchCaches
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.kvcache.row_content import RowContent, read_caches
from tests.support.batches.kv_model import feed
from tests.support.batches.kv_reference import (
    KEY_DIM,
    KV_HEADS,
    VALUE_DIM,
    PlainRow,
    own_caches,
    random_row,
)

pytestmark = pytest.mark.mlx

WINDOWS = (None, 4)
STATE_NBYTES = (3 + 5) * 4
TOKEN_NBYTES = KV_HEADS * (KEY_DIM + VALUE_DIM) * 4
SPLIT = BatchForm(split=True)


def model_caches(kv: Sequence[Any] | None = None, state: float = 0.0) -> list[Any]:
    """A hybrid's layers: KV, a list of state and window, and a state alone."""
    grown, window = kv or own_caches(WINDOWS)
    inner, outer = ArraysCache(1), ArraysCache(1)
    inner[0], outer[0] = mx.full((1, 3), state), mx.full((1, 5), -state)
    return [grown, CacheList(inner, window), outer]


LAYOUT = inspect_caches(model_caches())


def request_of(length: int, state: float) -> tuple[PlainRow, RowContent]:
    """A request whose state is ``state`` in all its numbers."""
    rng = np.random.default_rng(length)
    row, kv = random_row(rng, 0, WINDOWS), own_caches(WINDOWS)
    feed(kv, row, length, rng)
    content = read_caches(LAYOUT, model_caches(kv, state), length)
    assert content is not None
    return row, content


def batch_of(*lengths: int, form: BatchForm = SPLIT) -> tuple[BatchCaches, list[PlainRow]]:
    """Row ``key`` has state ``key + 1``."""
    batch = BatchCaches(LAYOUT, form, [1, 1], min_width=8, slab_tokens=16)
    rows = []
    for key, length in enumerate(lengths):
        row, content = request_of(length, key + 1.0)
        batch.join(key, content, room=length + 1)
        rows.append(row)
    return batch, rows


def step(batch: BatchCaches, rows: Sequence[PlainRow]) -> tuple[int, ...]:
    """A token of ones for every row, which adds 10 to its states."""
    order = batch.begin_step()
    leaves = LAYOUT.flatten(batch.caches)
    for layer, cache in enumerate((leaves[0], leaves[2])):
        keys, values = (mx.ones((len(order), KV_HEADS, 1, dim)) for dim in (KEY_DIM, VALUE_DIM))
        cache.update_and_fetch(keys, values)
        cache.attended()
        for key in order:
            rows[key].append(layer, np.array(keys[0]), np.array(values[0]))
    leaves[1][0] = leaves[1][0] + 10.0
    leaves[3][0] = leaves[3][0] - 10.0
    batch.end_step()
    return order


def expect_row(batch: BatchCaches, key: int, row: PlainRow, state: float) -> None:
    assert batch.length(key) == row.length
    (grown,) = batch.saved_kv(key, 0, row.length)
    snapshot = batch.snapshot(key)
    assert snapshot.position == row.length
    for kv, tokens, kept in ((grown, row.layers[0], 999), (snapshot.windows[0], row.layers[1], 4)):
        for array, expected in zip(kv, tokens, strict=True):
            np.testing.assert_array_equal(np.array(array[0]), expected[:, -kept:])
    assert [kept[0].tolist() for kept in snapshot.states] == [[[state] * 3], [[-state] * 5]]


def test_the_model_sees_caches_nested_as_its_own():
    batch, _ = batch_of(3)
    assert [type(cache).__name__ for cache in batch.caches] == [
        "BatchedKVCache",
        "CacheList",
        "BatchedStateCache",
    ]
    assert isinstance(batch.caches[1][0], ArraysCache)


@pytest.mark.parametrize("form", [SPLIT, BatchForm(split=False)])
def test_every_kind_of_a_row_keeps_to_its_request(form):
    # Rows of unequal slabs, windows that are full and that are not, and rows that move.
    batch, rows = batch_of(3, 12, 7, 1, form=form)
    added = [0.0] * 4
    here = [0, 1, 2, 3]
    for leaves in (None, None, 0, None, 3, None):
        if leaves is not None:
            batch.leave(leaves)
            here.remove(leaves)
        assert sorted(step(batch, rows)) == here
        batch.check()
        for key in here:
            added[key] += 10.0
            expect_row(batch, key, rows[key], key + 1 + added[key])


def test_a_state_layer_is_called_once_with_all_rows_in_their_order():
    batch, rows = batch_of(12, 3)
    order = step(batch, rows)
    assert order == (1, 0)
    states = LAYOUT.flatten(batch.caches)[3][0]
    assert states.shape == (2, 5)
    assert states[:, 0].tolist() == [-12.0, -11.0]


def test_a_step_snapshots_nothing_by_itself_and_a_snapshot_outlives_what_follows():
    batch, rows = batch_of(3, 6)
    step(batch, rows)
    segments = Segments()
    mx.eval(segments.put_snapshot(0, batch.snapshot(0)))
    at = rows[0].length
    step(batch, rows)
    batch.leave(0)
    then = segments.read_snapshot(0)
    assert then.position == at == 4
    assert then.states[0][0].tolist() == [[11.0] * 3]
    window = rows[0].layers[1][0][:, :4]
    np.testing.assert_array_equal(np.array(then.windows[0].keys[0]), window)


def test_a_request_that_is_not_here_has_nothing_to_snapshot():
    batch, _ = batch_of(3)
    with pytest.raises(KeyError):
        batch.snapshot(7)


def test_only_the_tokens_that_are_asked_for_are_copied():
    batch, rows = batch_of(9, 2)
    (kv,) = batch.saved_kv(0, 4, 7)
    np.testing.assert_array_equal(np.array(kv.values[0]), rows[0].layers[0][1][:, 4:7])


def test_what_a_row_takes_is_counted_and_given_back():
    batch, rows = batch_of(3)
    assert batch.nbytes == (8 + 4) * TOKEN_NBYTES + STATE_NBYTES
    _, content = request_of(5, 2.0)
    batch.join(1, content, room=6)
    rows.append(request_of(5, 2.0)[0])
    assert batch.nbytes == 2 * ((8 + 4) * TOKEN_NBYTES + STATE_NBYTES)
    step(batch, rows)
    assert batch.used_tokens == 4 + 6
    batch.leave(1)
    batch.compact()
    assert batch.nbytes == (8 + 4) * TOKEN_NBYTES + STATE_NBYTES
    batch.leave(0)
    assert (batch.nbytes, batch.used_tokens, batch.arrays()) == (0, 0, [])


def test_rows_with_states_take_no_chunks():
    batch, _ = batch_of(3)
    with pytest.raises(AssertionError, match="chunks are rows without a state"):
        batch.begin_step([MixedChunk(own_caches(WINDOWS), position=0, num_tokens=2)])
