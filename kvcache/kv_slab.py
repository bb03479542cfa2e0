"""A few rows of KV of equal width, for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_dp.kvcache.kv_row import KVRow, LayerKV


class KVSlab:
    """Up to ``max_rows`` rows of up to ``width`` tokens each, packed from row 0.

    Per layer the keys and the values are one buffer [rows, KV heads, width, head dim]. A row's
    content starts at index 0, and zeros lie behind it: never what another row left over, since one
    NaN of that under a mask would poison the output. Buffers grow by doubling up to
    ``max_rows``, so a join copies at most the slab it joins and never another slab.
    """

    def __init__(self, width: int, max_rows: int) -> None:
        self.width = width
        self.max_rows = max_rows
        self.rows: list[KVRow] = []
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._left_over: dict[int, int] = {}

    @property
    def full(self) -> bool:
        return len(self.rows) == self.max_rows

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    @property
    def longest(self) -> int:
        return max(row.length for row in self.rows)

    def index(self, key: int) -> int:
        """Return the place of the row of this key."""
        return next(index for index, row in enumerate(self.rows) if row.key == key)

    def append(self, row: KVRow, content: Sequence[LayerKV]) -> None:
        """Copy a row's KV, [1, KV heads, row.length, head dim] per layer, behind the last row."""
        assert not self.full and row.length <= self.width, (len(self.rows), row, self.width)
        index = len(self.rows)
        self._reserve(index + 1, content)
        self.rows.append(row)
        self._put(index, row.length, content, left_over=self._left_over.pop(index, 0))

    def content(self, index: int) -> list[LayerKV]:
        """Copy one row's KV of every layer out of the slab."""
        length = self.rows[index].length
        content = [
            LayerKV(
                mx.contiguous(keys[index : index + 1, :, :length]),
                mx.contiguous(values[index : index + 1, :, :length]),
            )
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        # Waited for: a view that is still to be read holds the buffer, and the next write to it
        # would copy all rows instead of working in place.
        mx.eval(content)
        return content

    def replace(self, index: int, row: KVRow, content: Sequence[LayerKV]) -> None:
        """Put a row in the place of one that left."""
        left_over = self.rows[index].length
        self.rows[index] = row
        self._put(index, row.length, content, left_over=left_over)

    def pop(self) -> KVRow:
        """Forget the last row. Its content stays, unreachable, until another row comes."""
        row = self.rows.pop()
        self._left_over[len(self.rows)] = row.length
        return row

    def widen(self, width: int) -> None:
        """Make room for longer rows. Copies the slab: for models that allow one slab only."""
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                rows, heads, old, dim = buffer.shape
                pad = mx.zeros((rows, heads, width - old, dim), dtype=buffer.dtype)
                buffers[layer] = mx.concatenate([buffer, pad], axis=2)
        self.width = width

    def write(self, layer: int, step: "SlabStep", new: LayerKV) -> LayerKV:
        """Write one token a row at the row's own position; return what the rows may see.

        ``new`` is [rows, KV heads, 1, head dim]; the result has ``step.visible`` tokens.
        """
        count = len(self.rows)
        for buffers, fresh in ((self._keys, new.keys), (self._values, new.values)):
            buffer = buffers[layer]
            if step.position is not None:
                at = step.position
                buffer[:count, :, at : at + 1] = fresh
            else:
                buffer[step.indices, :, step.positions] = fresh[:, :, 0]
            buffers[layer] = buffer
        return LayerKV(
            self._keys[layer][:count, :, : step.visible],
            self._values[layer][:count, :, : step.visible],
        )

    def begin_step(self, start: int) -> "SlabStep":
        """Describe the coming step, whose batch rows begin at ``start``, and count its token."""
        lengths = [row.length for row in self.rows]
        assert lengths and max(lengths) < self.width, (lengths, self.width)
        for row in self.rows:
            row.length += 1
        longest = max(lengths)
        if min(lengths) == longest:
            return SlabStep(start, start + len(lengths), longest + 1, longest, None, None, None)
        positions = mx.array(lengths, dtype=mx.int32)
        visible = mx.arange(longest + 1, dtype=mx.int32) <= positions[:, None]
        return SlabStep(
            start,
            start + len(lengths),
            longest + 1,
            None,
            mx.arange(len(lengths), dtype=mx.int32),
            positions,
            visible[:, None, None, :],
        )

    def _reserve(self, count: int, like: Sequence[LayerKV]) -> None:
        held = self._keys[0].shape[0] if self._keys else 0
        if count <= held:
            return
        rows = min(self.max_rows, max(1, 2 * held))
        if not held:
            self._keys = [self._zeros(rows, kv.keys) for kv in like]
            self._values = [self._zeros(rows, kv.values) for kv in like]
            return
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = mx.concatenate([buffer, self._zeros(rows - held, buffer)])

    def _zeros(self, rows: int, like: mx.array) -> mx.array:
        return mx.zeros((rows, like.shape[1], self.width, like.shape[3]), dtype=like.dtype)

    def _put(self, index: int, length: int, content: Sequence[LayerKV], *, left_over: int) -> None:
        # Left lazy: whatever is evaluated by name is held until the device has done it, and the
        # next write to it would be a copy. The next step evaluates it on its way.
        for layer, kv in enumerate(content):
            for buffer, fresh in ((self._keys[layer], kv.keys), (self._values[layer], kv.values)):
                if length:
                    buffer[index : index + 1, :, :length] = fresh
                if length < left_over:
                    buffer[index : index + 1, :, length:left_over] = 0


@dataclass(frozen=True, slots=True)
class SlabStep:
    """One decode step on one slab.

    Batch rows ``start`` to ``end`` are its rows. Where all of them have the same length,
    ``position`` is where they write, and no mask is needed; else ``indices`` and ``positions``
    say it row by row, and ``mask`` [rows, 1, 1, visible] is true where a row may look.
    """

    start: int
    end: int
    visible: int
    position: int | None
    indices: mx.array | None
    positions: mx.array | None
    mask: mx.array | None
