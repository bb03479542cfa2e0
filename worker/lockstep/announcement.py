"""Announcements between ranks before each pass: a small frame, and the board that collects them."""

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


class AnnouncementBoard:
    """Collects the peers' announcements of one generation, pass by pass.

    A peer enters the next pass once it has heard from all others. So it may be ahead by one pass,
    never by two: the board holds at most two announcements per rank.
    """

    def __init__(self, *, generation: int, rank: int, size: int) -> None:
        self._generation = generation
        self._peers = [peer for peer in range(size) if peer != rank]
        self._number = 0
        self._announced: dict[int, dict[int, RankRows]] = {peer: {} for peer in self._peers}

    @property
    def number(self) -> int:
        """The pass to agree on next."""
        return self._number

    @property
    def wanted(self) -> bool:
        """Whether a peer has entered this pass and waits."""
        return any(self._number in announced for announced in self._announced.values())

    @property
    def missing(self) -> list[int]:
        """The peers that have not announced this pass."""
        return [peer for peer in self._peers if self._number not in self._announced[peer]]

    def add(self, announcement: Announcement) -> None:
        """Add a peer's announcement. Raises ForeignFrameError if it does not belong to this pass or
        the next.
        """
        if announcement.generation != self._generation:
            raise ForeignFrameError(f"it is of generation {announcement.generation}")
        if announcement.rank not in self._announced:
            raise ForeignFrameError(f"it is of rank {announcement.rank}")
        announced = self._announced[announcement.rank]
        ahead = announcement.number - self._number
        if ahead not in (0, 1) or announcement.number in announced:
            raise ForeignFrameError(
                f"rank {announcement.rank} is at pass {announcement.number}, this one at "
                f"{self._number}"
            )
        announced[announcement.number] = announcement.rows

    def agree(self, rank: int, rows: RankRows) -> tuple[RankRows, ...]:
        """Go on to the next pass; return each rank's rows in this one."""
        assert not self.missing, f"pass {self._number}: no announcement of ranks {self.missing}"
        others = {peer: announced.pop(self._number) for peer, announced in self._announced.items()}
        self._number += 1
        return tuple(rows if r == rank else others[r] for r in range(len(others) + 1))
