"""The content of a request's caches is copied out and into others without loss."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.kvcache.row_content import (
    RowContent,
    Snapshot,
    cache_arrays,
    fill_caches,
    make_room,
    read_caches,
)
from tests.support.batches.kv_model import feed
from tests.support.batches.kv_reference import PlainRow, own_caches, random_row

pytestmark = pytest.mark.mlx

WINDOW = 8
LEAVES = (None, WINDOW, 3)
LAYOUT = inspect_caches(own_caches(LEAVES))
HISTORIES = {
    "before the window is full": (5,),
    "single tokens before it is full": (1, 1, 1),
    "as many as the window": (8,),
    "single tokens until it is full": (1,) * 8,
    "single tokens beyond": (1,) * 11,
    "a long chunk": (20,),
    "a long chunk and single tokens": (20, 1, 1, 1),
    "chunks of several": (5, 5, 5, 5),
    "a mixture": (1, 7, 9, 1, 1, 6),
    "around the ring twice": (3, *(1,) * 17),
}


def filled(history: tuple[int, ...], rng: np.random.Generator) -> tuple[PlainRow, list[Any]]:
    row, caches = random_row(rng, 0, LEAVES), own_caches(LEAVES)
    for num_tokens in history:
        feed(caches, row, num_tokens, rng)
    return row, caches


def expect_read(content: RowContent | None, row: PlainRow) -> None:
    assert content is not None
    assert content.length == content.recent.position == row.length
    windows = [window for window in row.windows if window is not None]
    found = [*content.kv, *content.recent.windows]
    for kv, tokens, window in zip(found, row.layers, [row.length, *windows], strict=True):
        for array, expected in zip(kv, tokens, strict=True):
            np.testing.assert_array_equal(np.array(array[0]), expected[:, -window:])


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_tokens_are_read_in_their_order_in_time_however_they_came(history):
    row, caches = filled(history, np.random.default_rng(1))
    expect_read(read_caches(LAYOUT, caches, row.length), row)


@pytest.mark.parametrize("goes_on", [(1, 1, 1, 1), (4, 1), (12, 1)])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_caches_that_are_filled_go_on_as_those_they_were_read_from(history, goes_on):
    rng = np.random.default_rng(1)
    row, caches = filled(history, rng)
    content = read_caches(LAYOUT, caches, row.length)
    assert content is not None
    others = own_caches(LEAVES)
    fill_caches(LAYOUT, others, content.kv, content.recent, length=row.length, room=40)
    assert [cache.offset for cache in others] == [row.length] * 3
    for num_tokens in goes_on:
        feed(others, row, num_tokens, rng)
        expect_read(read_caches(LAYOUT, others, row.length), row)


@pytest.mark.parametrize("length", [1, 4, 7])
def test_windows_that_hold_the_first_token_can_be_cut_back(length):
    rng = np.random.default_rng(1)
    leaves = (None, WINDOW)
    layout = inspect_caches(own_caches(leaves))
    row, caches = random_row(rng, 0, leaves), own_caches(leaves)
    feed(caches, row, layout.trims_to, rng)
    content = read_caches(layout, caches, layout.trims_to)
    assert content is not None
    shorter = PlainRow([(k[:, :length], v[:, :length]) for k, v in row.layers], leaves)
    others = own_caches(leaves)
    kv = [kv.tokens(0, length) for kv in content.kv]
    fill_caches(layout, others, kv, content.recent, length=length, room=20)
    expect_read(read_caches(layout, others, length), shorter)
    for num_tokens in (1, 9, 1):
        feed(others, shorter, num_tokens, rng)


def test_a_window_that_lost_its_first_token_is_not_cut_back():
    rng = np.random.default_rng(1)
    _, caches = filled((9,), rng)
    content = read_caches(LAYOUT, caches, 9)
    assert content is not None
    kv = [kv.tokens(0, 8) for kv in content.kv]
    with pytest.raises(AssertionError):
        fill_caches(LAYOUT, own_caches(LEAVES), kv, content.recent, length=8, room=20)


def test_growing_caches_have_their_room_at_once():
    rng = np.random.default_rng(1)
    row, caches = filled((5,), rng)
    content = read_caches(LAYOUT, caches, 5)
    assert content is not None
    fresh = own_caches(LEAVES)
    make_room(LAYOUT, fresh, 700)
    feed(fresh, random_row(rng, 0, LEAVES), 3, rng)
    assert fresh[0].keys.shape[2] == 700
    others = own_caches(LEAVES)
    fill_caches(LAYOUT, others, content.kv, content.recent, length=5, room=700)
    assert others[0].keys.shape[2] == 700
    feed(others, row, 695, rng)
    assert others[0].keys.shape[2] == 700


class TestStates:
    """A hybrid's layer whose list has a state beside KV, and a layer of state alone."""

    @pytest.fixture
    def caches(self) -> list[Any]:
        kv = KVCache()
        kv.update_and_fetch(mx.ones((1, 2, 4, 3)), mx.ones((1, 2, 4, 3)))
        inner, outer = ArraysCache(2), ArraysCache(1)
        inner[0], inner[1], outer[0] = (
            mx.full((1, 3), 1.0),
            mx.full((1, 2, 2), 2.0),
            mx.ones((1, 5)),
        )
        return [CacheList(inner, kv), outer]

    def empty(self) -> list[Any]:
        return [CacheList(ArraysCache(2), KVCache()), ArraysCache(1)]

    def test_they_go_round_with_the_kv_beside_them(self, caches):
        layout = inspect_caches(caches)
        content = read_caches(layout, caches, 4)
        assert content is not None
        others = self.empty()
        fill_caches(layout, others, content.kv, content.recent, length=4, room=9)
        again = read_caches(layout, others, 4)
        assert again is not None
        assert (again.length, again.recent.position) == (4, 4)
        for found, expected in (
            ([a for kv in again.kv for a in kv], [a for kv in content.kv for a in kv]),
            (again.recent.arrays(), content.recent.arrays()),
        ):
            assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [len(state) for state in again.recent.states] == [2, 1]

    def test_one_that_is_not_written_yet_is_none_to_keep(self, caches):
        layout = inspect_caches(caches)
        caches[0][0][1] = None
        assert read_caches(layout, caches, 4) is None

    def test_one_is_not_cut_back(self, caches):
        layout = inspect_caches(caches)
        content = read_caches(layout, caches, 4)
        assert content is not None
        kv = [kv.tokens(0, 3) for kv in content.kv]
        with pytest.raises(AssertionError, match="a state after 4 tokens cannot be cut back to 3"):
            fill_caches(layout, self.empty(), kv, content.recent, length=3, room=9)

    def test_a_snapshot_stays_when_the_live_state_is_changed(self, caches):
        layout = inspect_caches(caches)
        content = read_caches(layout, caches, 4)
        assert content is not None
        snapshot = kept(content.recent)
        caches[1][0][:] = 9.0
        caches[0][0][0] = mx.full((1, 3), 9.0)
        assert [a.max().item() for a in snapshot.arrays()] == [1.0, 2.0, 1.0]

    def test_a_snapshot_stays_when_what_was_restored_is_changed(self, caches):
        layout = inspect_caches(caches)
        content = read_caches(layout, caches, 4)
        assert content is not None
        snapshot = kept(content.recent)
        for _ in range(2):
            others = self.empty()
            fill_caches(layout, others, content.kv, snapshot, length=4, room=9)
            assert others[1][0].max().item() == 1.0
            others[1][0][:] = 9.0

    def test_a_prefix_of_a_stateful_model_needs_a_snapshot(self, caches):
        layout = inspect_caches(caches)
        content = read_caches(layout, caches, 4)
        assert content is not None
        with pytest.raises(AssertionError, match="states and windows need a snapshot"):
            fill_caches(layout, self.empty(), content.kv, None, length=4, room=9)


def test_a_snapshot_counts_its_windows_and_its_states():
    window = LayerKV(mx.zeros((1, 2, 4, 3)), mx.zeros((1, 2, 4, 5)))
    snapshot = Snapshot(4, (window,), ((mx.zeros((1, 7)),), (mx.zeros((1, 2)), mx.zeros((1, 1)))))
    assert snapshot.nbytes == (2 * 4 * (3 + 5) + 7 + 2 + 1) * 4
    assert sum(array.nbytes for array in snapshot.arrays()) == snapshot.nbytes
    assert kept(snapshot).nbytes == snapshot.nbytes


def kept(snapshot: Snapshot) -> Snapshot:
    """The same, through the store of prefixes."""
    segments = Segments()
    mx.eval(segments.put_snapshot(0, snapshot))
    return segments.read_snapshot(0)


def test_caches_of_unknown_kinds_are_never_guessed_at():
    caches = [QuantizedKVCache()]
    layout = inspect_caches(caches)
    with pytest.raises(AssertionError, match="QuantizedKVCache"):
        read_caches(layout, caches, 0)
    with pytest.raises(AssertionError, match="QuantizedKVCache"):
        fill_caches(layout, caches, [], None, length=0, room=1)


def test_all_arrays_are_found_in_whatever_containers_a_state_has():
    class Odd:
        def __init__(self, state: Any) -> None:
            self.state = state

    a, b, c, d = (mx.array([i]) for i in range(4))
    caches = [Odd({"x": [a, None, (b, 3, "name")], "y": {"z": c}}), Odd(None), Odd(d)]
    assert [array.item() for array in cache_arrays(caches)] == [0, 1, 2, 3]


def test_arrays_of_mlx_lms_own_caches_are_found():
    state = ArraysCache(3)
    state[1] = mx.ones((1, 2))
    _, caches = filled((4,), np.random.default_rng(1))
    assert len(cache_arrays([*caches, CacheList(state, KVCache())])) == 2 * 3 + 1
