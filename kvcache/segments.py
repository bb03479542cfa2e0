"""The KV of cached prefixes, in segments, and the snapshots of state beside them."""

from collections.abc import Collection, Sequence

import mlx.core as mx

from mlx_dp.kvcache.cached_prefix import CachedPrefix
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.row_content import Snapshot


class Segments:
    """Arrays by the numbers that the prefix tree gives them.

    A segment is the KV of some consecutive tokens, [1, KV heads, tokens, head dim] per leaf that
    keeps every token. All that is put here must be copies, as it outlives its request.
    """

    def __init__(self) -> None:
        self._segments: dict[int, list[LayerKV]] = {}
        self._snapshots: dict[int, Snapshot] = {}

    @property
    def nbytes(self) -> int:
        kept = sum(kv.nbytes for segment in self._segments.values() for kv in segment)
        return kept + sum(snapshot.nbytes for snapshot in self._snapshots.values())

    def has_snapshot(self, number: int) -> bool:
        return number in self._snapshots

    def put(self, number: int, kv: Sequence[LayerKV]) -> None:
        assert number not in self._segments, f"segment {number} is here already"
        self._segments[number] = list(kv)

    def store(self, number: int, snapshot: Snapshot) -> None:
        """Keep a snapshot, in the place of an older one of that number."""
        self._snapshots[number] = snapshot

    def restore(self, number: int) -> Snapshot:
        """Return a snapshot, which stays here and is not to be changed."""
        return self._snapshots[number]

    def fork(self, number: int, other: int) -> None:
        """Let a second number have a copy of a snapshot."""
        self._snapshots[other] = self._snapshots[number].copied()

    def split(self, number: int, at: int, head: int) -> None:
        """Move the first ``at`` tokens of a segment into a new one."""
        whole = self._segments[number]
        self.put(head, [kv.tokens(0, at).copied() for kv in whole])
        self._segments[number] = [kv.tokens(at, kv.keys.shape[2]).copied() for kv in whole]
        # Else both would hold the whole until somebody reads them.
        mx.async_eval(self._segments[head], self._segments[number])

    def read(self, prefix: CachedPrefix) -> list[LayerKV]:
        """Return the KV of a prefix, leaf by leaf."""
        pieces = [
            [kv.tokens(0, piece.num_tokens) for kv in self._segments[piece.segment]]
            for piece in prefix.pieces
        ]
        return [_joined(leaf) for leaf in zip(*pieces, strict=True)]

    def forget(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        """Drop what is there of these."""
        for number in segments:
            self._segments.pop(number, None)
        for number in snapshots:
            self._snapshots.pop(number, None)


def _joined(parts: Sequence[LayerKV]) -> LayerKV:
    if len(parts) == 1:
        return parts[0]
    return LayerKV(
        mx.concatenate([part.keys for part in parts], axis=2),
        mx.concatenate([part.values for part in parts], axis=2),
    )
