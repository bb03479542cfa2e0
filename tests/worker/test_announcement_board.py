import pytest

from mlx_dp.worker.announcement import FINGERPRINT_BYTES, Announcement, ForeignFrameError, RankRows
from mlx_dp.worker.announcement_board import AnnouncementBoard


def told(rank: int, number: int, tokens: int = 1, generation: int = 7) -> Announcement:
    return Announcement(
        generation=generation,
        rank=rank,
        number=number,
        rows=RankRows(tokens, tokens // 2),
        fingerprint=bytes(FINGERPRINT_BYTES),
    )


@pytest.fixture
def board() -> AnnouncementBoard:
    """Of rank 1 of three."""
    return AnnouncementBoard(generation=7, rank=1, size=3)


def test_a_pass_is_agreed_on_once_all_have_announced_it(board: AnnouncementBoard) -> None:
    assert (board.missing, board.wanted) == ([0, 2], False)
    board.take(told(2, 0, tokens=5))
    assert (board.missing, board.wanted) == ([0], True)
    board.take(told(0, 0, tokens=9))
    assert board.agree(1, RankRows(4, 0)) == ((9, 4), (4, 0), (5, 2))
    assert (board.number, board.missing, board.wanted) == (1, [0, 2], False)


def test_agreeing_before_is_our_bug(board: AnnouncementBoard) -> None:
    board.take(told(2, 0))
    with pytest.raises(AssertionError, match="nothing of"):
        board.agree(1, RankRows(4, 0))


def test_a_peer_may_be_ahead_by_one_pass(board: AnnouncementBoard) -> None:
    board.take(told(0, 0))
    board.take(told(0, 1, tokens=8))
    board.take(told(2, 0))
    board.agree(1, RankRows(0, 0))
    assert (board.missing, board.wanted) == ([2], True)
    board.take(told(2, 1, tokens=3))
    assert board.agree(1, RankRows(0, 0)) == ((8, 4), (0, 0), (3, 1))


@pytest.mark.parametrize(
    "announcement",
    [
        told(0, 2),
        told(0, 2**60),
        told(1, 0),
        told(3, 0),
        told(0, 0, generation=6),
        told(0, 0, generation=8),
    ],
)
def test_what_is_not_of_this_group_and_time_is_foreign(
    board: AnnouncementBoard, announcement: Announcement
) -> None:
    with pytest.raises(ForeignFrameError):
        board.take(announcement)
    assert board.missing == [0, 2]


def test_a_pass_is_announced_once(board: AnnouncementBoard) -> None:
    board.take(told(0, 0, tokens=2))
    with pytest.raises(ForeignFrameError):
        board.take(told(0, 0, tokens=3))
    board.take(told(2, 0))
    assert board.agree(1, RankRows(0, 0)) == ((2, 1), (0, 0), (1, 0))
    with pytest.raises(ForeignFrameError):
        board.take(told(0, 0, tokens=3))
