from dataclasses import replace

import pytest

from mlx_dp.worker.lockstep.announcement import (
    FINGERPRINT_BYTES,
    FRAME_BYTES,
    Announcement,
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
