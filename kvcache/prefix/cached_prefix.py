"""Identifiers that the prefix tree and the array store share.

The tree has tokens, the store has arrays. Both identify a run of KV by its segment number, and a
snapshot of state by its auxiliary slot. A number is not reused while it is in use.
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
    """The cached part of a prompt: ``pieces`` in order, ``num_tokens`` in total.

    ``snapshot`` is the state to start from, for models with state. It covers ``num_tokens`` tokens,
    or more where the state can be cut back.
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

    def drop(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        """Drop segments and snapshots that the tree has removed. Unknown numbers are ignored: they
        may not be saved yet.
        """
