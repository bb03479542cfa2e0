"""The KV of cached prefixes, in segments, and the snapshots of state beside them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_dp.kvcache.kv_row import LayerKV, joined
from mlx_dp.kvcache.packed_arrays import PackedArrays
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save
from mlx_dp.kvcache.row_content import Snapshot


class Segments:
    """Copies that outlive their request, by the numbers that the prefix tree gives them.

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

    def put(self, number: int, kv: Sequence[LayerKV]) -> list[mx.array]:
        """Copy a segment in. Returns its buffers, which are still to be evaluated."""
        assert number not in self._segments, f"segment {number} is here already"
        return self._hold(number, PackedArrays.of([array for layer in kv for array in layer]))

    def keep(
        self,
        saves: Sequence[Save],
        saved_kv: Callable[[Save], Sequence[LayerKV]],
        number: int | None,
        snapshot_now: Callable[[], Snapshot | None],
    ) -> list[mx.array]:
        """Copy the parts of a row that are to outlive it; ``number`` is its snapshot's, if it has
        one.

        Returns the copies, which are still to be evaluated.
        """
        copies: list[mx.array] = []
        for save in saves:
            copies += self.put(save.segment, saved_kv(save))
        if number is not None and (snapshot := snapshot_now()) is not None:
            copies += self.store(number, snapshot)
        return copies

    def store(self, number: int, snapshot: Snapshot) -> list[mx.array]:
        """Copy a snapshot in, in the place of an older one of that number.

        Returns its buffers, which are still to be evaluated.
        """
        self.forget((), (number,))
        packed = _PackedSnapshot.of(snapshot)
        self._snapshots[number] = packed
        self._count(packed.arrays, 1)
        return packed.arrays.buffers

    def restore(self, number: int) -> Snapshot:
        """Return a snapshot, which stays here and is not to be changed."""
        return self._snapshots[number].unpacked()

    def split(self, number: int, at: int, head: int) -> None:
        """Move the first ``at`` tokens of a segment into a new one."""
        assert head not in self._segments, f"segment {head} is here already"
        whole = self._segments[number]
        self.forget((number,), ())
        copies = self._hold(head, whole.mapped(lambda stack: stack[..., :at, :]))
        copies += self._hold(number, whole.mapped(lambda stack: stack[..., at:, :]))
        # Otherwise both would hold the whole segment until they are read.
        mx.async_eval(copies)

    def read(self, prefix: CachedPrefix) -> list[LayerKV]:
        """Return the KV of a prefix, leaf by leaf."""
        pieces = [
            [kv.tokens(0, piece.num_tokens) for kv in _layers(self._segments[piece.segment])]
            for piece in prefix.pieces
        ]
        return [joined(leaf) for leaf in zip(*pieces, strict=True)]

    def forget(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        """Drop segments and snapshots; unknown ones are no error."""
        for number in segments:
            if (segment := self._segments.pop(number, None)) is not None:
                self._count(segment, -1)
        for number in snapshots:
            if (snapshot := self._snapshots.pop(number, None)) is not None:
                self._count(snapshot.arrays, -1)

    def _hold(self, number: int, packed: PackedArrays) -> list[mx.array]:
        self._segments[number] = packed
        self._count(packed, 1)
        return packed.buffers

    def _count(self, packed: PackedArrays, sign: int) -> None:
        self._nbytes += sign * packed.nbytes(self._page_nbytes)
        self._num_buffers += sign * len(packed.buffers)


@dataclass(frozen=True, slots=True)
class _PackedSnapshot:
    """A snapshot's windows and then its states, of which ``state_sizes`` has the lengths."""

    position: int
    num_windows: int
    state_sizes: tuple[int, ...]
    arrays: PackedArrays

    @classmethod
    def of(cls, snapshot: Snapshot) -> "_PackedSnapshot":
        return cls(
            position=snapshot.position,
            num_windows=len(snapshot.windows),
            state_sizes=tuple(map(len, snapshot.states)),
            arrays=PackedArrays.of(snapshot.arrays()),
        )

    def unpacked(self) -> Snapshot:
        arrays = iter(self.arrays.unpacked())
        windows = tuple(LayerKV(next(arrays), next(arrays)) for _ in range(self.num_windows))
        states = tuple(tuple(next(arrays) for _ in range(size)) for size in self.state_sizes)
        return Snapshot(self.position, windows, states)


def _layers(packed: PackedArrays) -> list[LayerKV]:
    arrays: Iterable[mx.array] = iter(packed.unpacked())
    return [LayerKV(keys, values) for keys, values in zip(arrays, arrays, strict=True)]
