"""A rank's announcement to its peers before each pass: one small frame."""

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

FINGERPRINT_BYTES: Final = 16
_FIELDS: Final = struct.Struct(f">4sIHQII{FINGERPRINT_BYTES}s")
_MAGIC: Final = b"MDP2"
FRAME_BYTES: Final = _FIELDS.size


class ForeignFrameError(Exception):
    """A frame that is not an announcement of this group. It is dropped."""


class RankRows(NamedTuple):
    """A rank's rows in a pass, and how many of them need logits."""

    tokens: int
    answered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Rank to rank: the sender enters pass ``number`` with these rows; ``fingerprint``: its model.

    No rows: the sender takes part only because peers need it.
    """

    generation: int
    rank: int
    number: int
    rows: RankRows
    fingerprint: bytes

    def encode(self) -> bytes:
        return _FIELDS.pack(
            _MAGIC, self.generation, self.rank, self.number, *self.rows, self.fingerprint
        )


def decode(frame: bytes) -> Announcement:
    """Raises ForeignFrameError for a frame that cannot be an announcement."""
    if len(frame) != FRAME_BYTES:
        raise ForeignFrameError(f"{len(frame)} bytes, not {FRAME_BYTES}")
    magic, generation, rank, number, tokens, answered, fingerprint = _FIELDS.unpack(frame)
    if magic != _MAGIC:
        raise ForeignFrameError(f"it begins with {magic!r}")
    return Announcement(
        generation=generation,
        rank=rank,
        number=number,
        rows=RankRows(tokens, answered),
        fingerprint=fingerprint,
    )
