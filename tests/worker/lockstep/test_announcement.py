import random
from dataclasses import replace

import pytest

from mlx_dp.worker.lockstep.announcement import (
    FINGERPRINT_BYTES,
    FRAME_BYTES,
    Announcement,
    AnnouncementBoard,
    ForeignFrameError,
    RankRows,
    decode,
)

TOLD = Announcement(
    generation=3,
    rank=1,
    number=2**40,
    rows=RankRows(512, 3),
    fingerprint=bytes(range(FINGERPRINT_BYTES)),
)


@pytest.mark.parametrize("told", [TOLD, replace(TOLD, rows=RankRows(0, 0)), replace(TOLD, rank=63)])
def test_a_frame_says_what_was_announced(told: Announcement) -> None:
    frame = told.encode()
    assert len(frame) == FRAME_BYTES
    assert decode(frame) == told


@pytest.mark.parametrize("frame", [b"", b"x" * FRAME_BYTES, TOLD.encode() + b"x"])
def test_noise_is_no_announcement(frame: bytes) -> None:
    with pytest.raises(ForeignFrameError):
        decode(frame)


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
    """The board of rank 1 of three."""
    return AnnouncementBoard(generation=7, rank=1, size=3)


def test_a_pass_is_agreed_on_once_all_have_announced_it(board: AnnouncementBoard) -> None:
    assert (board.missing, board.wanted) == ([0, 2], False)
    board.add(told(2, 0, tokens=5))
    assert (board.missing, board.wanted) == ([0], True)
    board.add(told(0, 0, tokens=9))
    assert board.agree(1, RankRows(4, 0)) == ((9, 4), (4, 0), (5, 2))
    assert (board.number, board.missing, board.wanted) == (1, [0, 2], False)


def test_agreeing_before_is_our_bug(board: AnnouncementBoard) -> None:
    board.add(told(2, 0))
    with pytest.raises(AssertionError, match="no announcement"):
        board.agree(1, RankRows(4, 0))


def test_a_peer_may_be_ahead_by_one_pass(board: AnnouncementBoard) -> None:
    board.add(told(0, 0))
    board.add(told(0, 1, tokens=8))
    board.add(told(2, 0))
    board.agree(1, RankRows(0, 0))
    assert (board.missing, board.wanted) == ([2], True)
    board.add(told(2, 1, tokens=3))
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
        board.add(announcement)
    assert board.missing == [0, 2]


def test_a_pass_is_announced_once(board: AnnouncementBoard) -> None:
    board.add(told(0, 0, tokens=2))
    with pytest.raises(ForeignFrameError):
        board.add(told(0, 0, tokens=3))
    board.add(told(2, 0))
    assert board.agree(1, RankRows(0, 0)) == ((2, 1), (0, 0), (1, 0))
    with pytest.raises(ForeignFrameError):
        board.add(told(0, 0, tokens=3))


class Rank:
    """The passes of one rank's loop: it runs its own, and takes part in the others'."""

    def __init__(self, rank: int, size: int, passes: list[int]) -> None:
        self.rank = rank
        self.board = AnnouncementBoard(generation=7, rank=rank, size=size)
        self.passes = passes
        self.announced: int | None = None
        self.agreed: list[tuple[int, ...]] = []

    def run_once(self) -> Announcement | None:
        """Do everything that is possible now; return the announcements for all peers."""
        if self.announced is not None:
            if not self.board.missing:
                everyone = self.board.agree(self.rank, RankRows(self.announced, 0))
                self.agreed.append(tuple(rows.tokens for rows in everyone))
                self.announced = None
            return None
        if not self.passes and not self.board.wanted:
            return None
        self.announced = self.passes.pop(0) if self.passes else 0
        return told(self.rank, self.board.number, self.announced)


@pytest.mark.parametrize("seed", range(100))
def test_all_ranks_run_the_same_passes_in_whatever_order_they_hear_of_them(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    wanted = [[rng.randint(1, 9) for _ in range(rng.randint(0, 12))] for _ in range(size)]
    ranks = [Rank(rank, size, list(passes)) for rank, passes in enumerate(wanted)]
    on_the_way: dict[tuple[int, int], list[Announcement]] = {
        (a, b): [] for a in range(size) for b in range(size) if a != b
    }
    quiet = 0
    while quiet < 1_000:
        quiet += 1
        if rng.random() < 0.5:
            queue = on_the_way[rng.choice(list(on_the_way))]
            if queue:
                quiet = 0
                receiver = next(b for (_, b), waiting in on_the_way.items() if waiting is queue)
                ranks[receiver].board.add(queue.pop(0))
            continue
        rank = rng.choice(ranks)
        before = len(rank.agreed)
        announcement = rank.run_once()
        if announcement is not None:
            for (sender, _), queue in on_the_way.items():
                if sender == rank.rank:
                    queue.append(announcement)
        if announcement is not None or len(rank.agreed) > before:
            quiet = 0
    logs = [rank.agreed for rank in ranks]
    assert all(log == logs[0] for log in logs), logs
    for rank, passes in enumerate(wanted):
        assert [counts[rank] for counts in logs[0] if counts[rank]] == passes
    # Only passes that a rank has rows for.
    assert all(any(counts) for counts in logs[0])
    assert len(logs[0]) == max(map(len, wanted))
