"""The KV of all requests that decode together."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.batched_kv_cache import BatchedKVCache
from mlx_dp.kvcache.batch.kv_slab import KVSlab
from mlx_dp.kvcache.batch.kv_step import KVStep
from mlx_dp.kvcache.batch.kv_tail import TAIL_TOKENS
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.kv_row import KVRow, LayerKV

MIN_WIDTH: Final = 256
SLAB_TOKENS: Final = 8192
"""A slab has rows for about this many tokens. This bounds the copy that a join can cause."""


class KVBatch:
    """Rows of KV in slabs by width, seen by the model as one batch.

    A long request costs short ones neither memory nor attention, since they lie in other slabs.
    Widths are powers of two as long as rows share a slab, and sixteenths of the next power of two
    beyond. A row that fills its width moves to the next width, which copies that row alone; a row
    that leaves makes at most one other row move. The batch order is slab after slab, and changes
    with every join, leave and move: ``begin_step`` returns it.

    A form that is not split keeps all rows in one slab, for models that do their own attention
    arithmetic on the fetched arrays. The slab then widens for the longest row, which copies all
    rows.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        form: BatchForm,
        *,
        min_width: int = MIN_WIDTH,
        slab_tokens: int = SLAB_TOKENS,
        tail_tokens: int = TAIL_TOKENS,
    ) -> None:
        """``windows`` has one entry per layer; None: the layer keeps every token.

        ``tail_tokens``: the size of a tail, in a form that has them.
        """
        self._windows = tuple(windows)
        self.tail_tokens = tail_tokens if form.tails else 0
        self._split = form.split
        self._min_width = min_width
        self._slab_tokens = slab_tokens
        self._slabs: list[KVSlab] = []
        self._slab_of: dict[int, KVSlab] = {}
        self.spare_nbytes: int | None = None
        """Bytes that slabs may allocate for future rows; None: any number. A slab that grows
        doubles as long as that fits, and otherwise grows only by the rows needed.
        """
        self.caches = [
            BatchedKVCache(index, window=window, grouped_mask=form.grouped_mask)
            for index, window in enumerate(self._windows)
        ]

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def num_buffers(self) -> int:
        tails = self._windows.count(None) if self.tail_tokens else 0
        return 2 * (len(self._windows) + tails) * len(self._slabs)

    @property
    def asks_wide(self) -> bool:
        """Whether the model has asked for a mask wider than the cache's window."""
        return any(cache.asks_wide for cache in self.caches)

    @property
    def used_tokens(self) -> int:
        return sum(row.length for slab in self._slabs for row in slab.rows)

    def width_for(self, num_tokens: int) -> int:
        """Return the width that is allocated for a row of ``num_tokens`` tokens."""
        width = self._min_width
        while width < num_tokens:
            width *= 2
        if not self._split:
            return max(width, self._slabs[0].width) if self._slabs else width
        if width <= self._slab_tokens:
            return width
        # Such a row is alone in its slab, so a width that other rows share gains nothing.
        step = max(self._min_width, width // 16)
        return -(-num_tokens // step) * step

    def widened_tokens(self, num_tokens: int) -> int:
        """Return by how many tokens a row of ``num_tokens`` would widen the others in one slab."""
        if self._split or not self._slabs:
            return 0
        slab = self._slabs[0]
        return (self.width_for(num_tokens) - slab.width) * slab.held_rows

    def growing_widths(self) -> list[int]:
        """Return the new widths of the rows that are full, which the next step reallocates."""
        if not self._split:
            return [2 * s.width for s in self._slabs if s.longest == s.width for _ in s.rows]
        full = [row for slab in self._slabs for row in slab.rows if row.length == slab.width]
        return [self.width_for(row.length + 1) for row in full]

    def join(self, key: int, content: Sequence[LayerKV], *, length: int, room: int) -> None:
        """Copy in a row's KV, [1, KV heads, tokens that the layer keeps, head dim] per layer.

        ``room`` is the number of tokens that the row is expected to reach; the row may outgrow it.
        Windows are in ring order, see ``to_ring``.
        """
        assert key not in self._slab_of, f"row {key} is here already"
        self._append(KVRow(key, length), content, room=max(room, length + 1))

    def prepare(self, room: int, share: float, *, set_aside: int = 0) -> None:
        """Allocate a share of the memory that a row of ``room`` tokens will need when it joins.

        A slab that grows copies all its rows. Several calls spread the copy over the steps before
        the join. ``set_aside`` bytes are promised to future rows, this one included: memory that
        is allocated early must not displace anything else.
        """
        if not self._split:
            return
        width = self.width_for(room)
        slab = next((s for s in self._slabs if s.width == width and not s.full), None)
        spare = self.spare_nbytes
        if slab is None or (spare is not None and slab.nbytes > spare - set_aside):
            return
        held = slab.nbytes
        slab.prepare(share)
        if spare is not None:
            self.spare_nbytes = spare - (slab.nbytes - held)

    def leave(self, key: int) -> None:
        """Remove a row. The last row of the same width takes its place."""
        slab = self._slab_of.pop(key)
        self._remove(slab, slab.index(key))

    def length(self, key: int) -> int:
        """Return the number of tokens in a row, those of a step under way included."""
        slab = self._slab_of[key]
        return slab.rows[slab.index(key)].length

    def content(self, key: int) -> list[LayerKV]:
        """Copy a row's KV out, in the form that ``join`` takes."""
        slab = self._slab_of[key]
        return slab.content(slab.index(key))

    def views(self, key: int, start: int, end: int) -> list[LayerKV]:
        """Return views of a row's tokens. Copy, evaluate and drop them before the next step, or
        that step copies the slab.
        """
        slab = self._slab_of[key]
        return slab.views(slab.index(key), start, end)

    def compact(self) -> None:
        """Free memory that no row uses."""
        for slab in self._slabs:
            slab.shrink()

    def begin_step(
        self, chunks: Sequence[MixedChunk] = (), *, decode: bool = True
    ) -> tuple[int, ...]:
        """Prepare one token for every row; return their keys in batch order.

        Afterwards call the model once with ``caches``, on tokens [rows, 1]. Tokens of mixed chunks
        are further rows behind them, in a split form only. Without ``decode`` they are the only
        rows.
        """
        assert not chunks or self._split, "only a split batch takes chunks"
        assert chunks or decode, "nothing to run"
        if decode:
            self._move_full_rows()
        step = KVStep(self._slabs if decode else (), chunks)
        # A new array each step: models keep the old one past the update.
        offset = mx.array(step.offsets, dtype=mx.int32)
        for cache in self.caches:
            cache.begin_step(step, offset)
        return step.keys

    def end_step(self) -> list[mx.array]:
        """Check that the model has attended to the KV through the shared attention function.

        Returns arrays that the caller must evaluate: nothing else depends on them. Raises
        NotSplittableError when a split batch was not attended to: the model's output is wrong.
        """
        return [array for cache in self.caches for array in cache.end_step()]

    def check(self) -> None:
        """Assert that rows have one slab each, and only the last slab of a width has free rows."""
        held = {row.key: slab for slab in self._slabs for row in slab.rows}
        assert held == self._slab_of, (held, self._slab_of)
        assert sum(len(slab.rows) for slab in self._slabs) == len(held), held.keys()
        for slab in self._slabs:
            assert 0 < len(slab.rows) <= slab.max_rows
            assert all(row.length <= slab.width for row in slab.rows)
        for slab, after in pairwise(self._slabs):
            assert slab.width < after.width or (slab.width == after.width and slab.full)

    def _move_full_rows(self) -> None:
        if not self._split:
            for slab in self._slabs:
                if slab.longest == slab.width:
                    slab.widen(2 * slab.width)
            return
        full = [row for slab in self._slabs for row in slab.rows if row.length == slab.width]
        for row in full:
            content = self.content(row.key)
            slab = self._slab_of.pop(row.key)
            self._append(KVRow(row.key, row.length), content, room=row.length + 1)
            self._remove(slab, slab.index(row.key))

    def _append(self, row: KVRow, content: Sequence[LayerKV], *, room: int) -> None:
        slab = self._slab_for(room)
        held, spare = slab.nbytes, self.spare_nbytes
        slab.append(row, content, spare=spare is None or held <= spare)
        if spare is not None:
            self.spare_nbytes = spare - (slab.nbytes - held)
        self._slab_of[row.key] = slab

    def _remove(self, slab: KVSlab, index: int) -> None:
        if len(slab.rows) == 1:
            # The slab goes as a whole, so no row has to fill a gap.
            self._slabs.remove(slab)
            return
        last = next(s for s in reversed(self._slabs) if s.width == slab.width)
        end = len(last.rows) - 1
        if last is not slab or index != end:
            moved = last.rows[end]
            slab.replace(index, moved, last.content(end))
            self._slab_of[moved.key] = slab
        last.pop()
        if not last.rows:
            self._slabs.remove(last)

    def _slab_for(self, tokens: int) -> KVSlab:
        """Return a slab with a free row that is wide enough; make one if there is none."""
        width = self.width_for(tokens)
        if not self._split:
            return self._only_slab(width)
        for slab in self._slabs:
            if slab.width == width and not slab.full:
                return slab
        slab = KVSlab(
            width,
            max(1, self._slab_tokens // width),
            self._windows,
            tail_tokens=self.tail_tokens,
        )
        # Narrow slabs first, so that the batch order is stable under growth.
        at = next((i for i, s in enumerate(self._slabs) if s.width > width), len(self._slabs))
        self._slabs.insert(at, slab)
        return slab

    def _only_slab(self, width: int) -> KVSlab:
        if not self._slabs:
            self._slabs.append(KVSlab(width, 2**20, self._windows))
        elif self._slabs[0].width < width:
            self._slabs[0].widen(width)
        return self._slabs[0]
