"""The KV of cached prefixes, in segments, and the snapshots of state beside them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_dp.kvcache.kv_row import LayerKV, joined
from mlx_dp.kvcache.packed_arrays import PackedArrays
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save
from mlx_dp.kvcache.row_content import Snapshot


class Segments:
    """Copies of KV and state that outlive their request, by the prefix tree's numbers.

    A segment is the KV of some consecutive tokens, [1, KV heads, tokens, head dim] per leaf that
    keeps every token. Each segment and each snapshot takes a buffer or two, whatever the number of
    layers.
    """

    def __init__(self, page_nbytes: int = 1) -> None:
        self._page_nbytes = page_nbytes
        self._segments: dict[int, PackedArrays] = {}
        self._snapshots: dict[int, _PackedSnapshot] = {}
        self._nbytes = 0
        self._num_buffers = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def num_buffers(self) -> int:
        return self._num_buffers

    def has_snapshot(self, number: int) -> bool:
        return number in self._snapshots

    def put_segment(self, number: int, kv: Sequence[LayerKV]) -> list[mx.array]:
        """Copy a segment in. Returns its buffers, not yet evaluated."""
        assert number not in self._segments, f"segment {number} is here already"
        return self._store_segment(
            number, PackedArrays.pack([array for layer in kv for array in layer])
        )

    def save_row(
        self,
        saves: Sequence[Save],
        saved_kv: Callable[[Save], Sequence[LayerKV]],
        number: int | None,
        snapshot_now: Callable[[], Snapshot | None],
    ) -> list[mx.array]:
        """Copy the parts of a row that outlive it. ``number`` is the number of its snapshot, if
        any.

        Returns the copies, not yet evaluated.
        """
        copies: list[mx.array] = []
        for save in saves:
            copies += self.put_segment(save.segment, saved_kv(save))
        if number is not None and (snapshot := snapshot_now()) is not None:
            copies += self.put_snapshot(number, snapshot)
        return copies

    def put_snapshot(self, number: int, snapshot: Snapshot) -> list[mx.array]:
        """Copy a snapshot in; it replaces an older one of the same number.

        Returns its buffers, not yet evaluated.
        """
        self.drop((), (number,))
        packed = _PackedSnapshot.pack(snapshot)
        self._snapshots[number] = packed
        self._count(packed.arrays, 1)
        return packed.arrays.buffers

    def read_snapshot(self, number: int) -> Snapshot:
        """Return a snapshot. It stays here; do not change it."""
        return self._snapshots[number].unpacked()

    def split(self, number: int, at: int, head: int) -> None:
        """Move the first ``at`` tokens of a segment into a new one."""
        assert head not in self._segments, f"segment {head} is here already"
        whole = self._segments[number]
        self.drop((number,), ())
        copies = self._store_segment(head, whole.mapped(lambda stack: stack[..., :at, :]))
        copies += self._store_segment(number, whole.mapped(lambda stack: stack[..., at:, :]))
        # While lazy, both would keep the whole segment alive.
        mx.async_eval(copies)

    def read_prefix(self, prefix: CachedPrefix) -> list[LayerKV]:
        """Return the KV of a prefix, leaf by leaf."""
        pieces = [
            [kv.tokens(0, piece.num_tokens) for kv in _layers(self._segments[piece.segment])]
            for piece in prefix.pieces
        ]
        return [joined(leaf) for leaf in zip(*pieces, strict=True)]

    def drop(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        """Drop segments and snapshots; unknown numbers are ignored."""
        for number in segments:
            if (segment := self._segments.pop(number, None)) is not None:
                self._count(segment, -1)
        for number in snapshots:
            if (snapshot := self._snapshots.pop(number, None)) is not None:
                self._count(snapshot.arrays, -1)

    def _store_segment(self, number: int, packed: PackedArrays) -> list[mx.array]:
        self._segments[number] = packed
        self._count(packed, 1)
        return packed.buffers

    def _count(self, packed: PackedArrays, sign: int) -> None:
        self._nbytes += sign * packed.nbytes(self._page_nbytes)
        self._num_buffers += sign * len(packed.buffers)


@dataclass(frozen=True, slots=True)
class _PackedSnapshot:
    """A snapshot's windows, then its states; ``state_sizes`` has the number of arrays in each."""

    position: int
    num_windows: int
    state_sizes: tuple[int, ...]
    arrays: PackedArrays

    @classmethod
    def pack(cls, snapshot: Snapshot) -> "_PackedSnapshot":
        return cls(
            position=snapshot.position,
            num_windows=len(snapshot.windows),
            state_sizes=tuple(map(len, snapshot.states)),
            arrays=PackedArrays.pack(snapshot.arrays()),
        )

    def unpacked(self) -> Snapshot:
        arrays = iter(self.arrays.unpacked())
        windows = tuple(LayerKV(next(arrays), next(arrays)) for _ in range(self.num_windows))
        states = tuple(tuple(next(arrays) for _ in range(size)) for size in self.state_sizes)
        return Snapshot(self.position, windows, states)


def _layers(packed: PackedArrays) -> list[LayerKV]:
    arrays: Iterable[mx.array] = iter(packed.unpacked())
    return [LayerKV(keys, values) for keys, values in zip(arrays, arrays, strict=True)]
