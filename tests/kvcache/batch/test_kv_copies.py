"""Copies of a step, a join and a leave, read from the peak memory over about 100 MB of KV."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_batch import KVBatch
from mlx_dp.kvcache.batch.kv_tail import TAIL_TOKENS
from mlx_dp.kvcache.kv_row import LayerKV
from tests.support.batches.held_inputs import inputs_held

pytestmark = pytest.mark.mlx

LAYERS, KV_HEADS, DIM = 12, 4, 64
PLAIN: tuple[int | None, ...] = (None,) * LAYERS
WINDOWED: tuple[int | None, ...] = (None, 256) * (LAYERS // 2)
"""Every second layer's window is full in all rows here but the shortest."""
TOKEN_NBYTES = 2 * LAYERS * KV_HEADS * DIM * 4
WIDTH = 512
ROW_NBYTES = WIDTH * TOKEN_NBYTES
SMALL = 2 * 2**20
"""Activations and masks of a step: far less than one layer of any slab here."""

IN_SLABS = BatchForm(split=True)
ONE_SLAB = BatchForm(split=False)
WITH_TAILS = BatchForm(split=True, tails=True)
EVEN = (300,) * 8
MIXED = (300, 310, 290, 305, 295, 312, 301, 299)
SPLIT = (100,) * 4 + (300, 310, 290, 305, 295, 312, 301, 299)


def content(length: int, windows: Sequence[int | None] = PLAIN) -> list[LayerKV]:
    kept = [length if window is None else min(window, length) for window in windows]
    rows = [LayerKV(*(mx.ones((1, KV_HEADS, tokens, DIM)) for _ in range(2))) for tokens in kept]
    mx.eval(rows)
    return rows


def step(batch: KVBatch) -> mx.array:
    """Launch one step as a decode does: each layer on the lazy output of the one before."""
    hidden = mx.ones((len(batch.begin_step()), KV_HEADS, 1, DIM))
    for cache in batch.caches:
        fetched = LayerKV(*cache.update_and_fetch(hidden, hidden))
        if cache.split:
            hidden = cache.attend(hidden, fetched, scale=0.1, sinks=None)
        else:
            hidden = mx.fast.scaled_dot_product_attention(
                hidden, *fetched, scale=0.1, mask=cache.make_mask(1)
            )
    del fetched
    batch.end_step()
    mx.async_eval(hidden)
    return hidden


def warm_batch(
    lengths: Sequence[int],
    *,
    form: BatchForm = IN_SLABS,
    windows: Sequence[int | None] = PLAIN,
) -> KVBatch:
    batch = KVBatch(windows, form)
    for key, length in enumerate(lengths):
        batch.join(key, content(length, windows), length=length, room=length + 20)
    for _ in range(2):
        mx.eval(step(batch))
    mx.synchronize()
    return batch


def peak_nbytes(work: Callable[[], None]) -> int:
    """The most bytes that ``work`` needed beyond those held before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_peak_memory() - before


def run_overlapped(batch: KVBatch, steps: int = 5) -> None:
    """As the engine does: the next step is built on a step that still runs."""
    running = step(batch)
    for _ in range(steps):
        launched = step(batch)
        mx.eval(running)
        running = launched
    mx.eval(running)


@pytest.mark.parametrize(
    ("lengths", "form", "windows"),
    [
        pytest.param(EVEN, IN_SLABS, PLAIN, id="equal lengths"),
        pytest.param(MIXED, IN_SLABS, PLAIN, id="mixed lengths"),
        pytest.param(SPLIT, IN_SLABS, PLAIN, id="two slabs"),
        pytest.param(MIXED, ONE_SLAB, PLAIN, id="one slab by order"),
        pytest.param(MIXED, IN_SLABS, WINDOWED, id="full windows"),
        pytest.param(SPLIT, IN_SLABS, WINDOWED, id="windows in two slabs"),
        pytest.param(SPLIT, WITH_TAILS, PLAIN, id="tails"),
        pytest.param(SPLIT, WITH_TAILS, WINDOWED, id="tails and windows"),
    ],
)
def test_a_steady_step_copies_none_of_the_kv(lengths, form, windows):
    batch = warm_batch(lengths, form=form, windows=windows)
    assert batch.nbytes > (90 if windows is PLAIN else 70) * 10**6
    assert peak_nbytes(partial(run_overlapped, batch)) < SMALL


@pytest.mark.parametrize("lengths", [EVEN, MIXED, SPLIT])
def test_steps_copy_the_slabs_in_place_of_which_only_tails_are_copied(lengths):
    """On a device that holds a step's inputs until the next one is built."""

    def held_twice(form: BatchForm) -> float:
        """The peak memory of steps, in bytes of the slabs."""
        start = mx.get_active_memory()
        with inputs_held():
            batch = warm_batch(lengths, form=form)
            peak_nbytes(partial(run_overlapped, batch))
            return (mx.get_peak_memory() - start) / batch.nbytes

    assert held_twice(IN_SLABS) > 1.9
    assert held_twice(WITH_TAILS) < 1.2


def test_a_tail_is_folded_once_in_as_many_steps_as_it_has_tokens():
    with inputs_held():
        batch = warm_batch(EVEN, form=WITH_TAILS)
        folded = [
            peak_nbytes(partial(run_overlapped, batch, steps=0)) > 8 * ROW_NBYTES // 2
            for _ in range(2 * TAIL_TOKENS)
        ]
    at = [step for step, copied in enumerate(folded) if copied]
    assert len(at) == 2
    assert at[1] - at[0] == TAIL_TOKENS


@pytest.mark.parametrize(
    ("lengths", "windows"), [(EVEN, PLAIN), (MIXED, PLAIN), (SPLIT, PLAIN), (MIXED, WINDOWED)]
)
def test_a_leave_copies_one_row_at_most(lengths, windows):
    batch = warm_batch(lengths, windows=windows)
    rows = []

    def leave_under_way() -> None:
        rows.append(step(batch))
        batch.leave(len(lengths) - 7)
        mx.eval(rows.pop(), step(batch))

    assert peak_nbytes(leave_under_way) < max(lengths) * TOKEN_NBYTES + SMALL


def test_the_last_row_leaves_without_any_copy():
    batch = warm_batch(MIXED)

    def leave_under_way() -> None:
        running = step(batch)
        batch.leave(len(MIXED) - 1)
        mx.eval(running, step(batch))

    assert peak_nbytes(leave_under_way) < SMALL


def test_a_row_that_is_alone_in_its_slab_leaves_without_any_copy():
    batch = KVBatch(PLAIN, IN_SLABS, slab_tokens=WIDTH)
    for key, length in enumerate(EVEN):
        batch.join(key, content(length), length=length, room=length + 20)
    mx.eval(step(batch))
    mx.synchronize()
    held = batch.nbytes

    assert peak_nbytes(lambda: batch.leave(0)) < SMALL
    assert batch.nbytes == held - ROW_NBYTES


def test_a_join_into_a_free_row_copies_no_other_row():
    batch = warm_batch(MIXED)
    batch.leave(len(MIXED) - 1)
    mx.eval(step(batch))
    newcomer = content(250)

    def join_under_way() -> None:
        running = step(batch)
        batch.join(100, newcomer, length=250, room=300)
        mx.eval(running, step(batch))

    assert peak_nbytes(join_under_way) < SMALL


def test_a_join_that_needs_a_slab_copies_no_other_slab():
    batch = warm_batch(MIXED)
    newcomer = content(100)

    def join_under_way() -> None:
        running = step(batch)
        batch.join(100, newcomer, length=100, room=120)
        mx.eval(running, step(batch))

    assert peak_nbytes(join_under_way) < ROW_NBYTES // 2 + SMALL


def test_room_is_made_in_shares_before_a_join_which_then_copies_no_other_row():
    batch = warm_batch(MIXED[:4])
    held, newcomer = batch.nbytes, content(250)

    def prepare(share: float) -> None:
        running = step(batch)
        batch.prepare(300, share)
        mx.eval(running, step(batch))

    for steps_left in (3, 2, 1):
        before = batch.nbytes
        # The copies of a third of the layers, and as much room behind them.
        assert peak_nbytes(partial(prepare, 1 / steps_left)) < 2 * held // 3 + SMALL
        assert batch.nbytes - before == held // 3
    prepare(1.0)
    assert batch.nbytes == 2 * held

    def join_under_way() -> None:
        running = step(batch)
        batch.join(100, newcomer, length=250, room=300)
        mx.eval(running, step(batch))

    assert peak_nbytes(join_under_way) < SMALL


def test_a_join_copies_the_slab_it_joins_at_most_and_layer_by_layer():
    batch = warm_batch(MIXED[:4])
    held, newcomer = batch.nbytes, content(250)
    assert held == 4 * ROW_NBYTES

    def join_under_way() -> None:
        running = step(batch)
        batch.join(100, newcomer, length=250, room=300)
        mx.eval(running, step(batch))

    grown = peak_nbytes(join_under_way)
    assert batch.nbytes == 2 * held
    assert grown < 2 * held


def test_a_row_that_outgrows_its_slab_copies_itself_alone():
    batch = warm_batch((509, *MIXED[1:]))

    def grow_under_way() -> None:
        running = step(batch)
        mx.eval(running, step(batch))

    assert peak_nbytes(grow_under_way) < SMALL + 3 * ROW_NBYTES
    assert batch.begin_step() == (1, 2, 3, 4, 5, 6, 7, 0)
    assert [at.end - at.start for at in batch.caches[0].step.slab_steps] == [7, 1]
