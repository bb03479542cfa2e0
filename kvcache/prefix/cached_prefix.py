"""The names that the prefix cache's bookkeeping and its arrays share.

The tree knows tokens, the store knows arrays; both name a run of KV by its segment, and a snapshot
of state by its auxiliary slot. No number is used twice while it lives.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class SegmentPart(NamedTuple):
    """The first ``num_tokens`` tokens of a segment."""

    segment: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The part of a prompt that need not be computed: ``pieces`` in order, ``num_tokens`` in all.

    ``snapshot`` names the state to begin with, for models that have one. It lies at ``num_tokens``
    or, where the state can be cut back, beyond.
    """

    pieces: tuple[SegmentPart, ...]
    num_tokens: int
    snapshot: int | None = None


class Save(NamedTuple):
    """Copy the KV of a request's tokens ``start`` to ``end`` into a new segment."""

    segment: int
    start: int
    end: int


class PrefixStore(Protocol):
    """The arrays of segments and snapshots. No method waits for the device."""

    def split(self, segment: int, at: int, head: int) -> None:
        """Move the first ``at`` tokens of a segment into a new one, ``head``."""

    def forget(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        """Drop segments and snapshots that left the tree. Unknown ones are no error: their save
        may still be to come.
        """
