"""The KV of cached prefixes, in segments, and the snapshots of state beside them."""

from collections.abc import Callable, Collection, Sequence

import mlx.core as mx

from mlx_dp.kvcache.cached_prefix import CachedPrefix, Save
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
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def has_snapshot(self, number: int) -> bool:
        return number in self._snapshots

    def put(self, number: int, kv: Sequence[LayerKV]) -> None:
        assert number not in self._segments, f"segment {number} is here already"
        self._segments[number] = list(kv)
        self._nbytes += _size(kv)

    def keep(
        self,
        saves: Sequence[Save],
        copy_kv: Callable[[Save], Sequence[LayerKV]],
        number: int | None,
        take_snapshot: Callable[[], Snapshot | None],
    ) -> list[mx.array]:
        """Take in what is to outlive a request; ``number`` is its snapshot's, if it has one.

        Returns the copies, which are still to be evaluated.
        """
        copies: list[mx.array] = []
        for save in saves:
            kv = copy_kv(save)
            self.put(save.segment, kv)
            copies += [array for layer in kv for array in layer]
        if number is not None and (snapshot := take_snapshot()) is not None:
            self.store(number, snapshot)
            copies += snapshot.arrays()
        return copies

    def store(self, number: int, snapshot: Snapshot) -> None:
        """Keep a snapshot, in the place of an older one of that number."""
        self.forget((), (number,))
        self._snapshots[number] = snapshot
        self._nbytes += snapshot.nbytes

    def restore(self, number: int) -> Snapshot:
        """Return a snapshot, which stays here and is not to be changed."""
        return self._snapshots[number]

    def fork(self, number: int, other: int) -> None:
        """Let a second number have a copy of a snapshot."""
        self.store(other, self._snapshots[number].copied())

    def split(self, number: int, at: int, head: int) -> None:
        """Move the first ``at`` tokens of a segment into a new one."""
        whole = self._segments[number]
        self.forget((number,), ())
        self.put(head, [kv.tokens(0, at).copied() for kv in whole])
        self.put(number, [kv.tokens(at, kv.keys.shape[2]).copied() for kv in whole])
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
            self._nbytes -= _size(self._segments.pop(number, ()))
        for number in snapshots:
            if (snapshot := self._snapshots.pop(number, None)) is not None:
                self._nbytes -= snapshot.nbytes


def _size(kv: Sequence[LayerKV]) -> int:
    return sum(layer.nbytes for layer in kv)


def _joined(parts: Sequence[LayerKV]) -> LayerKV:
    if len(parts) == 1:
        return parts[0]
    return LayerKV(
        mx.concatenate([part.keys for part in parts], axis=2),
        mx.concatenate([part.values for part in parts], axis=2),
    )
