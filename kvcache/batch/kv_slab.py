"""A few rows of KV of equal width, for every layer."""

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_dp.kvcache.batch.kv_tail import KVTail
from mlx_dp.kvcache.batch.slab_step import SlabStep
from mlx_dp.kvcache.kv_row import KVRow, LayerKV, joined


class KVSlab:
    """Up to ``max_rows`` rows of up to ``width`` tokens each, packed from row 0.

    Per layer the keys and the values are one buffer [rows, KV heads, width, head dim]. A row's
    content starts at index 0, and zeros lie behind it, never the content of an earlier row: one
    NaN there would poison the output even under a mask. A layer with a window is no wider than the
    window, and a token's index in it is its position modulo the window.

    With a tail, layers that keep every token hold their newest tokens there until it is folded.
    Windows have no tail: copying one costs its width, however long the rows are.
    """

    def __init__(
        self, width: int, max_rows: int, windows: Sequence[int | None], *, tail_tokens: int = 0
    ) -> None:
        """``windows`` has one entry per layer; None: the layer keeps every token.

        ``tail_tokens``: the size of the tail; 0: tokens are written in place.
        """
        self.width = width
        self.max_rows = max_rows
        self.rows: list[KVRow] = []
        self._windows = windows
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._left_over: dict[int, int] = {}
        self._tail = KVTail(tail_tokens) if tail_tokens and None in windows else None

    @property
    def has_tail(self) -> bool:
        return self._tail is not None

    @property
    def full(self) -> bool:
        return len(self.rows) == self.max_rows

    @property
    def held_rows(self) -> int:
        """The number of rows that every layer has memory for."""
        return min((buffer.shape[0] for buffer in self._keys), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including a tail that the next step allocates."""
        tail = 0
        if self._tail is not None:
            growing = [layer for layer, window in enumerate(self._windows) if window is None]
            slabs = [LayerKV(self._keys[i], self._values[i]) for i in growing if self._keys]
            tail = self._tail.nbytes(len(self.rows), slabs)
        return tail + sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    @property
    def longest(self) -> int:
        return max(row.length for row in self.rows)

    def index(self, key: int) -> int:
        """Return the index of the row with this key."""
        return next(index for index, row in enumerate(self.rows) if row.key == key)

    def append(self, row: KVRow, content: Sequence[LayerKV], *, spare: bool) -> None:
        """Copy a row's KV behind the last row.

        ``content`` is [1, KV heads, tokens that the layer keeps, head dim] per layer. Without free
        memory the slab doubles, or with ``spare`` False grows by this row alone. So a join copies
        at most one slab.
        """
        assert not self.full and row.length <= self.width, (len(self.rows), row, self.width)
        self._fold(drop=True)
        index = len(self.rows)
        self._reserve(index + 1, content, spare=spare)
        self.rows.append(row)
        self._put(index, row.length, content, left_over=self._left_over.pop(index, 0))

    def prepare(self, share: float) -> None:
        """If no row is free, double this share of the layers that have not doubled yet."""
        held = self.held_rows
        if len(self.rows) < held or self.full:
            return
        rows = min(self.max_rows, 2 * held)
        small = [layer for layer, keys in enumerate(self._keys) if keys.shape[0] < rows]
        for layer in small[: math.ceil(share * len(small))]:
            self._grow(layer, rows)

    def content(self, index: int) -> list[LayerKV]:
        """Copy one row's KV of every layer out of the slab, in the form that ``append`` takes."""
        length = self.rows[index].length
        content = [kv.copied() for kv in self.views(index, 0, length)]
        # Evaluated now: a pending view holds the buffer, and the next write to it would copy all
        # rows instead of working in place.
        mx.eval(content)
        return content

    def views(self, index: int, start: int, end: int) -> list[LayerKV]:
        """Return views of one row's tokens; of layers with a window, all tokens that they keep.

        Tokens in the slab and in the tail are joined.
        """
        views: list[LayerKV] = []
        folded = self.rows[index].length - self._in_tail
        for layer, window in enumerate(self._windows):
            slab = LayerKV(self._keys[layer], self._values[layer])
            kept = slab.row(index)
            if window is not None:
                views.append(kept.tokens(0, self._kept(window, end)))
            elif self._tail is None or end <= folded:
                views.append(kept.tokens(start, end))
            else:
                tail = self._tail.row(layer, index, slab)
                newest = tail.tokens(max(0, start - folded), end - folded)
                views.append(
                    joined((kept.tokens(start, folded), newest)) if start < folded else newest
                )
        return views

    def replace(self, index: int, row: KVRow, content: Sequence[LayerKV]) -> None:
        """Put a row in the place of one that left."""
        self._fold()
        left_over = self.rows[index].length
        self.rows[index] = row
        self._put(index, row.length, content, left_over=left_over)

    def pop(self) -> KVRow:
        """Remove the last row. Its content stays, unreachable, until another row replaces it."""
        row = self.rows.pop()
        self._left_over[len(self.rows)] = row.length
        return row

    def shrink(self) -> None:
        """Free the memory of unused rows. Copies the others."""
        if all(buffer.shape[0] == len(self.rows) for buffer in self._keys):
            return
        self._fold(drop=True)
        self._left_over = {}
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = mx.contiguous(buffer[: len(self.rows)])
        # While lazy, the larger buffers would stay alive until the next step is done.
        mx.eval(self._keys, self._values)

    def widen(self, width: int) -> None:
        """Allow longer rows. Copies the slab: for models that allow only one slab."""
        for buffers in (self._keys, self._values):
            for layer, (buffer, window) in enumerate(zip(buffers, self._windows, strict=True)):
                rows, heads, old, dim = buffer.shape
                if (more := self._kept(window, width) - old) > 0:
                    pad = mx.zeros((rows, heads, more, dim), dtype=buffer.dtype)
                    buffers[layer] = mx.concatenate([buffer, pad], axis=2)
        self.width = width

    def write(self, layer: int, step: SlabStep, new: LayerKV) -> tuple[LayerKV, ...]:
        """Write one token per row; return the KV that rows may see: in the slab, then in the tail.

        ``new`` is [rows, KV heads, 1, head dim].
        """
        count = len(self.rows)
        if self._tail is not None and self._windows[layer] is None:
            kept = LayerKV(self._keys[layer][:count], self._values[layer][:count])
            tail = self._tail.write(layer, step.in_tail, new)
            return (kept.tokens(0, step.folded.visible), tail)
        place = step.place(self._windows[layer])
        for buffers, fresh in ((self._keys, new.keys), (self._values, new.values)):
            buffer = buffers[layer]
            if place.position is not None:
                at = place.position
                buffer[:count, :, at : at + 1] = fresh
            else:
                buffer[step.indices, :, place.positions] = fresh[:, :, 0]
            buffers[layer] = buffer
        kept = LayerKV(self._keys[layer][:count], self._values[layer][:count])
        return (kept.tokens(0, place.visible),)

    def begin_step(self, start: int) -> SlabStep:
        """Describe the next step, whose batch rows begin at ``start``, and count its tokens."""
        lengths = [row.length for row in self.rows]
        assert lengths and max(lengths) < self.width, (lengths, self.width)
        if self._tail is not None and self._tail.full:
            self._fold()
        step = SlabStep(start, tuple(lengths), self._in_tail)
        for row in self.rows:
            row.length += 1
        if self._tail is not None:
            self._tail.used += 1
        return step

    @property
    def _in_tail(self) -> int:
        """The number of each row's newest tokens that are not in the slab yet."""
        return 0 if self._tail is None else self._tail.used

    def _fold(self, *, drop: bool = False) -> None:
        """Write the tail's tokens to the slab. ``drop``: free the tail, since rows will change."""
        if self._tail is None:
            return
        if self._tail.used:
            starts = tuple(row.length - self._tail.used for row in self.rows)
            for layer, window in enumerate(self._windows):
                if window is None:
                    self._tail.fold(layer, LayerKV(self._keys[layer], self._values[layer]), starts)
        self._tail.clear()
        if drop:
            self._tail.drop()

    def _kept(self, window: int | None, tokens: int) -> int:
        return tokens if window is None else min(window, tokens)

    def _reserve(self, count: int, like: Sequence[LayerKV], *, spare: bool) -> None:
        held = self.held_rows
        if count <= held:
            return
        rows = min(self.max_rows, max(1, 2 * held)) if spare else count
        if not held:
            self._keys = self._zeros(rows, [kv.keys for kv in like])
            self._values = self._zeros(rows, [kv.values for kv in like])
            return
        for layer in range(len(self._keys)):
            self._grow(layer, rows)

    def _grow(self, layer: int, rows: int) -> None:
        """Allocate memory for ``rows`` rows in one layer, if it has less."""
        for buffers in (self._keys, self._values):
            buffer = buffers[layer]
            if (more := rows - buffer.shape[0]) > 0:
                zeros = mx.zeros((more, *buffer.shape[1:]), dtype=buffer.dtype)
                buffers[layer] = mx.concatenate([buffer, zeros])

    def _zeros(self, rows: int, like: Sequence[mx.array]) -> list[mx.array]:
        return [
            mx.zeros(
                (rows, array.shape[1], self._kept(window, self.width), array.shape[3]),
                dtype=array.dtype,
            )
            for array, window in zip(like, self._windows, strict=True)
        ]

    def _put(self, index: int, length: int, content: Sequence[LayerKV], *, left_over: int) -> None:
        # Left lazy: an array that is evaluated explicitly is held until the device is done, and the
        # next write to it would be a copy. The next step evaluates it on its way.
        for layer, (kv, window) in enumerate(zip(content, self._windows, strict=True)):
            own, old = self._kept(window, length), self._kept(window, left_over)
            for buffer, fresh in ((self._keys[layer], kv.keys), (self._values[layer], kv.values)):
                if own:
                    buffer[index : index + 1, :, :own] = fresh
                if own < old:
                    buffer[index : index + 1, :, own:old] = 0
