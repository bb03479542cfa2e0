"""The newest tokens of a slab's rows, in small buffers beside it.

A write to a buffer works in place only while nothing else holds the buffer. Metal holds the inputs
of a step until its command buffers are done, so the next step's writes may copy each buffer that
the step has read. With a tail, they copy only the tail, a few tokens per row, instead of the slab.
The slab itself is written only when the tail is folded into it.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from mlx_dp.kvcache.kv_row import LayerKV

TAIL_TOKENS: Final = 32
"""A fold may copy the slab. Once in this many steps it costs little, as does a tail of this size.
"""


class KVTail:
    """One column per step since the last fold, with one token of each row of the slab.

    Rows join only while the tail is empty, so all rows have the same columns, and attention to the
    tail needs no mask.
    """

    def __init__(self, num_tokens: int) -> None:
        """``num_tokens``: the number of columns."""
        self.num_tokens = num_tokens
        self.used = 0
        self._layers: dict[int, LayerKV] = {}

    @property
    def full(self) -> bool:
        return self.used == self.num_tokens

    def nbytes(self, rows: int, slabs: Sequence[LayerKV]) -> int:
        """Return the bytes of the tails of ``rows`` rows in the layers of a slab."""
        buffers = [buffer for slab in slabs for buffer in slab]
        token = sum(b.itemsize * b.shape[1] * b.shape[3] for b in buffers)
        return rows * self.num_tokens * token

    def write(self, layer: int, column: int, new: LayerKV) -> LayerKV:
        """Write [rows, KV heads, 1, head dim] to a column; return all columns up to it."""
        rows = new.keys.shape[0]
        kept = self._buffers(layer, new)
        for buffer, fresh in zip(kept, new, strict=True):
            buffer[:rows, :, column : column + 1] = fresh
        return LayerKV(kept.keys[:rows], kept.values[:rows]).tokens(0, column + 1)

    def row(self, layer: int, index: int, slab: LayerKV) -> LayerKV:
        """Return a view of one row's columns."""
        return self._buffers(layer, slab).row(index).tokens(0, self.used)

    def fold(self, layer: int, slab: LayerKV, starts: tuple[int, ...]) -> None:
        """Write all columns to the rows of a slab's buffers, at each row's own start."""
        kept = self._buffers(layer, slab).tokens(0, self.used)
        rows, first = len(starts), starts[0]
        for buffer, tail in zip(slab, kept, strict=True):
            if min(starts) == max(starts):
                buffer[:rows, :, first : first + self.used] = tail[:rows]
            else:
                index = mx.arange(rows, dtype=mx.int32)[:, None]
                places = mx.array(starts, dtype=mx.int32)[:, None] + mx.arange(self.used)
                buffer[index, :, places] = tail[:rows].transpose(0, 2, 1, 3)

    def clear(self) -> None:
        """Empty all columns. Their memory is reused."""
        self.used = 0

    def drop(self) -> None:
        """Free the memory: the next columns may belong to other rows."""
        assert not self.used, f"{self.used} tokens a row are not folded"
        self._layers = {}

    def _buffers(self, layer: int, like: LayerKV) -> LayerKV:
        """Return a layer's buffers, zeros if they are new."""
        if layer not in self._layers:
            self._layers[layer] = LayerKV(self._zeros(like.keys), self._zeros(like.values))
        return self._layers[layer]

    def _zeros(self, like: mx.array) -> mx.array:
        rows, heads, _, dim = like.shape
        return mx.zeros((rows, heads, self.num_tokens, dim), dtype=like.dtype)


def attend_both(
    queries: mx.array,
    slab: LayerKV,
    tail: LayerKV,
    *,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with [rows, heads, 1, head dim] to a slab and its tail, without joining them.

    A joined array would be the copy that the tail avoids, and MLX's fused attention takes one
    array. So this is unfused attention as MLX computes it, with one softmax over the scores of
    both. ``mask`` [rows, 1, 1, tokens] is true for the tokens of the slab that a row may see.
    """
    rows, heads, _, dim = queries.shape
    kv_heads = slab.keys.shape[1]
    grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, dim)
    old = grouped @ slab.keys.swapaxes(-1, -2)
    if mask is not None:
        old = mx.where(mask, old, mx.finfo(old.dtype).min)
    parts = [old, grouped @ tail.keys.swapaxes(-1, -2)]
    if sinks is not None:
        by_head = sinks.astype(old.dtype).reshape(1, kv_heads, heads // kv_heads, 1)
        parts.append(mx.broadcast_to(by_head, (*old.shape[:-1], 1)))
    weights = mx.softmax(mx.concatenate(parts, axis=-1), axis=-1, precise=True)
    seen, end = old.shape[-1], old.shape[-1] + tail.keys.shape[2]
    out = weights[..., :seen] @ slab.values + weights[..., seen:end] @ tail.values
    return out.reshape(rows, heads, 1, -1)
