"""KV of cached prefixes comes out as it went in, however its segments are cut."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, SegmentPart
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.kvcache.row_content import Snapshot, fill_caches
from tests.support.batches.kv_reference import PlainRow, own_caches, random_row

pytestmark = pytest.mark.mlx

TOKENS = 12


def segment(row: PlainRow, start: int, end: int) -> list[LayerKV]:
    return [kv.tokens(start, end).copied() for kv in row.content()]


def prefix(*pieces: tuple[int, int]) -> CachedPrefix:
    return CachedPrefix(
        pieces=tuple(SegmentPart(*piece) for piece in pieces), num_tokens=sum(n for _, n in pieces)
    )


def expect_tokens(found: list[LayerKV], row: PlainRow, end: int) -> None:
    for kv, tokens in zip(found, row.layers, strict=True):
        for array, expected in zip(kv, tokens, strict=True):
            np.testing.assert_array_equal(np.array(array[0]), expected[:, :end])


@pytest.fixture
def row() -> PlainRow:
    return random_row(np.random.default_rng(1), TOKENS)


@pytest.fixture
def segments(row: PlainRow) -> Segments:
    """One segment, number 1, of all tokens."""
    segments = Segments()
    segments.put_segment(1, segment(row, 0, TOKENS))
    return segments


@pytest.mark.parametrize("end", [1, 5, TOKENS])
def test_a_prefix_is_the_first_tokens_of_its_segment(end, row, segments):
    expect_tokens(segments.read_prefix(prefix((1, end))), row, end)


def test_a_prefix_is_read_across_pieces_the_last_of_which_is_cut(row):
    segments = Segments()
    for number, (start, end) in enumerate(((0, 5), (5, 6), (6, 12))):
        segments.put_segment(number, segment(row, start, end))
    expect_tokens(segments.read_prefix(prefix((0, 5), (1, 1), (2, 3))), row, 9)


def test_a_segment_takes_a_buffer_for_each_shape_whatever_the_number_of_layers():
    segments = Segments()
    layer = LayerKV(mx.zeros((1, 2, 5, 4)), mx.zeros((1, 2, 5, 3)))
    odd = LayerKV(mx.zeros((1, 1, 5, 4), dtype=mx.float16), mx.zeros((1, 1, 5, 0)))
    assert len(segments.put_segment(1, [layer] * 30 + [odd])) == 3
    assert segments.num_buffers == 3
    assert segments.nbytes == 30 * layer.nbytes + odd.nbytes
    segments.split(1, 2, head=2)
    assert segments.num_buffers == 6
    shapes = [
        (kv.keys.shape, kv.values.shape) for kv in segments.read_prefix(prefix((2, 2), (1, 3)))
    ]
    assert shapes == [((1, 2, 5, 4), (1, 2, 5, 3))] * 30 + [((1, 1, 5, 4), (1, 1, 5, 0))]
    segments.drop([1, 2], [])
    assert segments.num_buffers == 0


def test_splitting_moves_the_first_tokens_and_copies_no_more(row, segments):
    held = segments.nbytes
    segments.split(1, 5, head=2)
    assert segments.nbytes == held
    expect_tokens(segments.read_prefix(prefix((2, 5), (1, 7))), row, TOKENS)
    expect_tokens(segments.read_prefix(prefix((2, 5))), row, 5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(1, TOKENS - 1), unique=True, max_size=5))
def test_however_a_segment_is_cut_the_pieces_are_the_whole(cuts):
    row = random_row(np.random.default_rng(1), TOKENS)
    segments = Segments()
    segments.put_segment(0, segment(row, 0, TOKENS))
    pieces = {(0, TOKENS): 0}
    for number, cut in enumerate(cuts, start=1):
        (start, end), whole = next(item for item in pieces.items() if item[0][0] < cut < item[0][1])
        segments.split(whole, cut - start, head=number)
        del pieces[(start, end)]
        pieces |= {(start, cut): number, (cut, end): whole}
    in_order = [(number, end - start) for (start, end), number in sorted(pieces.items())]
    expect_tokens(segments.read_prefix(prefix(*in_order)), row, TOKENS)


def test_a_split_segment_does_not_hold_the_whole():
    segments = Segments()
    whole = [LayerKV(*(mx.zeros((1, 1, 2**20, 2)) for _ in range(2)))]
    mx.eval(whole)
    segments.put_segment(1, whole)
    del whole
    before = mx.get_active_memory()
    segments.split(1, 16, head=2)
    mx.synchronize()
    segments.drop([1], [])
    assert mx.get_active_memory() < before - 15 * 2**20
    assert segments.nbytes == 2 * 16 * 2 * 4


def test_what_is_forgotten_is_gone_and_what_is_unknown_is_no_error(segments):
    segments.put_snapshot(7, Snapshot(4, (), ((mx.ones((1, 3)),),)))
    assert segments.has_snapshot(7)
    segments.drop([1, 99], [7, 99])
    assert segments.nbytes == 0
    assert not segments.has_snapshot(7)
    with pytest.raises(KeyError):
        segments.read_prefix(prefix((1, 2)))


def test_a_number_names_one_segment(row, segments):
    with pytest.raises(AssertionError, match="segment 1 is here already"):
        segments.put_segment(1, segment(row, 0, 3))
    with pytest.raises(AssertionError, match="segment 1 is here already"):
        segments.split(1, 4, head=1)


def test_a_segment_stays_when_a_request_goes_on_from_it(row, segments):
    windows = (None, None)
    caches = own_caches(windows)
    layout = inspect_caches(caches)
    # No room to spare, so that nothing had to be copied into a larger buffer.
    kv = segments.read_prefix(prefix((1, TOKENS)))
    fill_caches(layout, caches, kv, None, length=TOKENS, room=TOKENS)
    caches[0].trim(3)
    caches[0].update_and_fetch(mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 3)))
    expect_tokens(segments.read_prefix(prefix((1, TOKENS))), row, TOKENS)


class TestSnapshots:
    @pytest.fixture
    def live(self) -> mx.array:
        return mx.full((1, 3), 1.0)

    @pytest.fixture
    def snapshot(self, live: mx.array) -> Snapshot:
        window = LayerKV(mx.full((1, 2, 4, 3), 2.0), mx.full((1, 2, 4, 3), 3.0))
        return Snapshot(4, (window,), ((live,),))

    def values(self, snapshot: Snapshot) -> list[float]:
        return [array.max().item() for array in snapshot.arrays()]

    def test_they_are_restored_as_they_were_stored(self, snapshot):
        segments = Segments()
        segments.put_snapshot(3, snapshot)
        assert segments.read_snapshot(3).position == 4
        assert self.values(segments.read_snapshot(3)) == [2.0, 3.0, 1.0]
        assert segments.nbytes == snapshot.nbytes

    def test_one_is_a_copy_and_stays_when_its_source_is_changed(self, snapshot, live):
        segments = Segments()
        mx.eval(segments.put_snapshot(3, snapshot))
        live[:] = 9.0
        snapshot.windows[0].keys[:] = 9.0
        assert self.values(segments.read_snapshot(3)) == [2.0, 3.0, 1.0]

    def test_states_of_like_shape_share_a_buffer_and_come_back_in_their_order(self):
        states = tuple(
            (mx.full((1, 3), float(at)), mx.full((1, 2, 2), 10.0 + at)) for at in range(30)
        )
        segments = Segments()
        segments.put_snapshot(3, Snapshot(4, (), states))
        assert segments.num_buffers == 2
        found = segments.read_snapshot(3).states
        assert [[a.max().item() for a in state] for state in found] == [
            [float(at), 10.0 + at] for at in range(30)
        ]
        segments.drop([], [3])
        assert segments.num_buffers == 0

    def test_a_later_one_takes_the_place_of_an_earlier_one(self, snapshot):
        segments = Segments()
        segments.put_snapshot(3, snapshot)
        segments.put_snapshot(3, Snapshot(8, (), ((mx.zeros((1, 3)),),)))
        assert segments.read_snapshot(3).position == 8
        assert segments.nbytes == 12

    def test_an_unknown_one_is_not_there(self):
        segments = Segments()
        assert not segments.has_snapshot(3)
        with pytest.raises(KeyError):
            segments.read_snapshot(3)
