import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.worker.lockstep.pass_rows import PassRows


@pytest.mark.parametrize(
    ("counts", "summed"),
    [
        ((8, 0), False),
        ((0, 512), False),
        ((8, 8), False),
        ((512, 3), False),
        ((512, 3, 4, 1), True),
        ((8, 0, 0), True),
        ((8, 8, 0, 0), False),
        ((8, 7, 0, 0), True),
        ((64, 64, 64, 64), False),
        ((0, 0), False),
    ],
)
def test_the_way_that_moves_fewer_rows_is_taken(counts: tuple[int, ...], summed: bool) -> None:
    for rank in range(len(counts)):
        assert PassRows(counts=counts, rank=rank).summed is summed


@pytest.mark.parametrize(
    ("counts", "pieces"),
    [
        ((4, 4), ()),
        ((4, 2), ((0, 4), (4, 6))),
        ((0, 3), ((3, 6),)),
        ((3, 0), ((0, 3),)),
        ((2, 5, 0, 4), ((0, 2), (5, 10), (15, 19))),
    ],
)
def test_padding_is_cut_away(counts: tuple[int, ...], pieces: tuple[tuple[int, int], ...]) -> None:
    assert PassRows(counts=counts, rank=0).pieces == pieces


@given(st.lists(st.integers(0, 40), min_size=2, max_size=8))
def test_either_way_gives_the_rows_of_all_ranks_in_order(counts: list[int]) -> None:
    """Rows are named by rank and number, and ``None`` is padding."""
    rows = [[(rank, i) for i in range(count)] for rank, count in enumerate(counts)]
    everyone = [row for each in rows for row in each]
    for rank in range(len(counts)):
        seen = PassRows(counts=tuple(counts), rank=rank)
        gathered = [row for each in rows for row in each + [None] * (seen.widest - len(each))]
        pieces = seen.pieces or ((0, len(gathered)),)
        assert [row for start, stop in pieces for row in gathered[start:stop]] == everyone
        assert everyone[seen.offset : seen.offset + seen.own] == rows[rank]
        assert seen.total == len(everyone)
