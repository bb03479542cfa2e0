from dataclasses import replace

import pytest

from mlx_dp.worker.announcement import (
    FINGERPRINT_BYTES,
    FRAME_BYTES,
    Announcement,
    ForeignFrameError,
    decode,
)

TOLD = Announcement(
    generation=3, rank=1, number=2**40, tokens=512, fingerprint=bytes(range(FINGERPRINT_BYTES))
)


@pytest.mark.parametrize("told", [TOLD, replace(TOLD, tokens=0), replace(TOLD, rank=63)])
def test_a_frame_says_what_was_announced(told: Announcement) -> None:
    frame = told.encode()
    assert len(frame) == FRAME_BYTES
    assert decode(frame) == told


@pytest.mark.parametrize("frame", [b"", b"x" * FRAME_BYTES, TOLD.encode() + b"x"])
def test_noise_is_no_announcement(frame: bytes) -> None:
    with pytest.raises(ForeignFrameError):
        decode(frame)
