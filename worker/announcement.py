"""What a rank tells its peers before each pass: one small frame, and who has said what."""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

FINGERPRINT_BYTES: Final = 16
_FIELDS: Final = struct.Struct(f">4sIHQI{FINGERPRINT_BYTES}s")
_MAGIC: Final = b"MDP1"
_SEAL_BYTES: Final = 16
FRAME_BYTES: Final = _FIELDS.size + _SEAL_BYTES


class ForeignFrameError(Exception):
    """A frame that is no announcement of this group: another's, or noise. It is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Rank to rank: I am at pass ``number`` with ``tokens`` rows, and ``fingerprint`` is my model.

    ``tokens`` 0: I take part because others want to.
    """

    generation: int
    rank: int
    number: int
    tokens: int
    fingerprint: bytes

    def encode(self, key: bytes) -> bytes:
        """Return the frame, sealed with what only this group knows."""
        fields = _FIELDS.pack(
            _MAGIC, self.generation, self.rank, self.number, self.tokens, self.fingerprint
        )
        return fields + _seal(fields, key)


def decode(frame: bytes, key: bytes) -> Announcement:
    """Raises ForeignFrameError for anything that ``encode`` has not made with this key."""
    if len(frame) != FRAME_BYTES:
        raise ForeignFrameError(f"{len(frame)} bytes, not {FRAME_BYTES}")
    fields, seal = frame[: _FIELDS.size], frame[_FIELDS.size :]
    magic, generation, rank, number, tokens, fingerprint = _FIELDS.unpack(fields)
    if magic != _MAGIC or not hmac.compare_digest(seal, _seal(fields, key)):
        raise ForeignFrameError("it bears no seal of this group")
    return Announcement(
        generation=generation, rank=rank, number=number, tokens=tokens, fingerprint=fingerprint
    )


def _seal(fields: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_SEAL_BYTES, key=key).digest()
