"""A chunk whose tokens are rows of a batch gives the same results as alone."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_batch import KVBatch
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.kvcache.row_content import read_caches
from tests.support.batches.kv_model import feed, run_step
from tests.support.batches.kv_reference import (
    MIXED,
    PLAIN,
    PlainPrompt,
    PlainRow,
    empty_prompt,
    random_row,
)

pytestmark = pytest.mark.mlx


def batch_with(*rows: PlainRow) -> KVBatch:
    batch = KVBatch(rows[0].windows, BatchForm(split=True), min_width=8, slab_tokens=16)
    for key, row in enumerate(rows):
        batch.join(key, row.content(), length=row.length, room=row.length + 9)
    return batch


def expect_caches(prompt: PlainPrompt) -> None:
    """The prompt's own caches hold its tokens, as after a chunk that ran alone."""
    layout = inspect_caches(prompt.caches)
    content = read_caches(layout, prompt.caches, prompt.row.length)
    assert content is not None
    kv, windows = iter(content.kv), iter(content.recent.windows)
    for tokens, window in zip(prompt.row.layers, prompt.row.windows, strict=True):
        found = next(kv) if window is None else next(windows)
        for array, expected in zip(found, tokens, strict=True):
            np.testing.assert_array_equal(np.array(array[0]), expected[:, -(window or 999) :])


@pytest.mark.parametrize("windows", [PLAIN, MIXED])
@pytest.mark.parametrize("decode", [True, False])
def test_several_chunks_leave_their_kv_in_their_own_caches(decode, windows):
    rng = np.random.default_rng(1)
    rows = {0: random_row(rng, 3, windows), 1: random_row(rng, 11, windows)}
    batch = batch_with(*rows.values())
    first, second = empty_prompt(rng, windows), empty_prompt(rng, windows)
    feed(second.caches, second.row, 5, rng)
    for sizes in ((1, 7), (4, 1), (1, 1), (9, 6)):
        chunks = list(zip((first, second), sizes, strict=True))
        run_step(batch, rows, rng, chunks, decode=decode)
        expect_caches(first)
        expect_caches(second)
    assert first.row.length == 15


def test_chunks_can_run_while_no_row_is_there():
    rng = np.random.default_rng(1)
    batch = KVBatch(MIXED, BatchForm(split=True))
    prompt = empty_prompt(rng, MIXED)
    run_step(batch, {}, rng, [(prompt, 5)], decode=False)
    run_step(batch, {}, rng, [(prompt, 5)], decode=True)
    expect_caches(prompt)
    assert (batch.nbytes, batch.used_tokens) == (0, 0)


def test_rows_that_do_not_decode_stay_where_they_are():
    rng = np.random.default_rng(1)
    rows = {0: random_row(rng, 8), 1: random_row(rng, 3)}
    batch = batch_with(*rows.values())
    held = batch.nbytes
    run_step(batch, rows, rng, [(empty_prompt(rng), 4)], decode=False)
    assert [batch.length(key) for key in rows] == [8, 3]
    assert batch.nbytes == held


def test_a_step_of_nothing_is_our_bug():
    with pytest.raises(AssertionError, match="nothing to run"):
        KVBatch(PLAIN, BatchForm(split=True)).begin_step(decode=False)


def test_one_slab_takes_no_chunks():
    rng = np.random.default_rng(1)
    chunk = empty_prompt(rng).chunk(2)
    with pytest.raises(AssertionError, match="only a split batch takes chunks"):
        KVBatch(PLAIN, BatchForm(split=False)).begin_step([chunk])


def test_a_mask_is_of_what_was_there_before_the_first_layer_wrote():
    rng = np.random.default_rng(1)
    windows = (4, 4)
    prompt = empty_prompt(rng, windows)
    feed(prompt.caches, prompt.row, 6, rng)
    chunk = MixedChunk(prompt.caches, position=6, num_tokens=3)
    new = LayerKV(mx.ones((3, 2, 1, 4)), mx.ones((3, 2, 1, 3)))
    for layer in range(2):
        seen = chunk.write(layer, new, window=4, asked=4)
        # Three tokens of the window before, as the first new one sees them, and the three.
        assert seen.keys.shape == (1, 2, 6, 4)
    expected = [[at - 3 <= place <= at for place in range(6)] for at in range(3, 6)]
    assert chunk.mask(4).tolist() == expected
