"""A store of prefixes that keeps tokens in place of arrays, and refuses missing ones."""

from collections.abc import Collection
from typing import NamedTuple

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save


class Text(NamedTuple):
    """Tokens from the start on: KV and state depend on all of them, and on the namespace."""

    namespace: str
    ids: tuple[int, ...]

    def upto(self, end: int) -> "Text":
        assert 0 <= end <= len(self.ids), (end, self.ids)
        return Text(self.namespace, self.ids[:end])


class Kept(NamedTuple):
    """A segment: the tokens of ``text`` from ``start`` on."""

    text: Text
    start: int


class StoreModel:
    """The ``PrefixStore``, and the engine's operations on it when a plan runs."""

    def __init__(self) -> None:
        self.segments: dict[int, Kept] = {}
        self.snapshots: dict[int, Text] = {}

    @property
    def num_tokens(self) -> int:
        return sum(len(kept.text.ids) - kept.start for kept in self.segments.values())

    def split(self, segment: int, at: int, head: int) -> None:
        assert head not in self.segments, f"segment {head} is here already"
        text, start = self.segments[segment]
        assert 0 < at < len(text.ids) - start, (at, start, text)
        self.segments[head] = Kept(text.upto(start + at), start)
        self.segments[segment] = Kept(text, start + at)

    def drop(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        """A segment is dropped by the tree only, a snapshot also by a request without state."""
        for segment in segments:
            del self.segments[segment]
        for snapshot in snapshots:
            self.snapshots.pop(snapshot, None)

    def save(self, saves: Collection[Save], text: Text) -> None:
        """Copy a request's KV."""
        for segment, start, end in saves:
            assert segment not in self.segments, f"segment {segment} is here already"
            assert start < end, (segment, start, end)
            self.segments[segment] = Kept(text.upto(end), start)

    def snapshot(self, slot: int, text: Text) -> None:
        """Copy a request's state."""
        self.snapshots[slot] = text

    def take(self, prefix: CachedPrefix, prompt: Text, trims_to: int) -> None:
        """Assert that a prefix holds the request's first tokens."""
        position = 0
        for piece in prefix.pieces:
            text, start = self.segments[piece.segment]
            assert start == position, (piece, start, position)
            position += piece.num_tokens
            assert text.upto(position) == prompt.upto(position), (piece, text, prompt)
        assert position == prefix.num_tokens < len(prompt.ids), (prefix, prompt)
        if prefix.snapshot is not None:
            state = self.snapshots[prefix.snapshot]
            assert state.upto(position) == prompt.upto(position), (prefix, state, prompt)
            assert len(state.ids) == position or len(state.ids) <= trims_to, (prefix, state)
