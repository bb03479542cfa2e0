"""The prefix store of the fake engine. It keeps tokens instead of arrays, to check each copy.

So an error in the prefix tree fails an assertion; with arrays it would give a wrong answer.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save
from mlx_dp.proto.capacity.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Segment:
    """The tokens of a segment, after ``start`` earlier tokens, on which their KV depends."""

    start: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state after ``num_tokens`` tokens; ``digest`` is their hash."""

    num_tokens: int
    digest: int


class FakeStore:
    """Segments and snapshots by their numbers."""

    def __init__(self, shape: ModelShape, *, stateful: bool) -> None:
        self._shape = shape
        self._stateful = stateful
        self._segments: dict[int, _Segment] = {}
        self._snapshots: dict[int, _Snapshot] = {}
        self._tokens = 0

    @property
    def nbytes(self) -> int:
        states = len(self._snapshots) * self._shape.auxiliary_bytes_per_slot
        return self._tokens * self._shape.kv_bytes_per_token + states

    def save(self, ids: Sequence[int], saves: Collection[Save]) -> None:
        """Copy KV of a request that was fed ``ids``."""
        for segment, start, end in saves:
            assert segment not in self._segments, f"segment {segment} exists"
            assert 0 <= start < end <= len(ids), (start, end, len(ids))
            self._segments[segment] = _Segment(start, tuple(ids[start:end]))
            self._tokens += end - start

    def snapshot(self, ids: Sequence[int], slot: int) -> None:
        """Copy the state of a request that was fed ``ids``; it replaces the slot's state."""
        assert self._stateful, "this model has no state"
        self._snapshots[slot] = _Snapshot(len(ids), hash(tuple(ids)))

    def split(self, segment: int, at: int, head: int) -> None:
        whole = self._segments[segment]
        assert 0 < at < len(whole.ids), (at, len(whole.ids))
        assert head not in self._segments, f"segment {head} exists"
        self._segments[head] = _Segment(whole.start, whole.ids[:at])
        self._segments[segment] = _Segment(whole.start + at, whole.ids[at:])

    def drop(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        for segment in segments:
            if (dropped := self._segments.pop(segment, None)) is not None:
                self._tokens -= len(dropped.ids)
        for slot in snapshots:
            self._snapshots.pop(slot, None)

    def verify(self, prefix: CachedPrefix, ids: Sequence[int]) -> None:
        """Assert that a prefix has the first of these tokens, and the state after them."""
        length = 0
        for segment, num_tokens in prefix.pieces:
            kept = self._segments[segment]
            assert kept.start == length, f"segment {segment} starts at {kept.start}, not {length}"
            assert 0 < num_tokens <= len(kept.ids), (num_tokens, len(kept.ids))
            spelled = tuple(ids[length : length + num_tokens])
            assert kept.ids[:num_tokens] == spelled, f"segment {segment} has other tokens"
            length += num_tokens
        assert length == prefix.num_tokens, (length, prefix.num_tokens)
        assert (prefix.snapshot is not None) == self._stateful, prefix.snapshot
        if prefix.snapshot is not None:
            found = self._snapshots[prefix.snapshot]
            wanted = _Snapshot(length, hash(tuple(ids[:length])))
            assert found == wanted, f"snapshot {prefix.snapshot} is of other tokens"

    def clear(self) -> None:
        self._segments.clear()
        self._snapshots.clear()
        self._tokens = 0
