"""One forward pass over the batch: its tokens, and the places of their KV."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_dp.kvcache.batch.kv_slab import KVSlab
from mlx_dp.kvcache.batch.kv_tail import attend_both
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.batch.slab_step import SlabStep
from mlx_dp.kvcache.kv_row import LayerKV

Seen = tuple[LayerKV, ...]
"""The KV that rows may see in one layer: one array, or a slab's and then its tail's."""


class KVStep:
    """One token of every row, slab after slab, and behind them the tokens of prompts' chunks.

    To the model each token is a row. The step holds slabs and chunks, so it must not outlive its
    pass.
    """

    def __init__(self, slabs: Sequence[KVSlab], chunks: Sequence[MixedChunk]) -> None:
        """Count one token for every row of ``slabs``. No row may be full."""
        self._slabs = tuple(slabs)
        self._chunks = tuple(chunks)
        self._asked: dict[int | None, int] = {}
        self.width = 1
        steps: list[SlabStep] = []
        for slab in slabs:
            steps.append(slab.begin_step(steps[-1].end if steps else 0))
        self.slab_steps: Sequence[SlabStep] = steps

    @property
    def keys(self) -> tuple[int, ...]:
        """The rows' keys in their order; tokens of chunks have none."""
        return tuple(row.key for slab in self._slabs for row in slab.rows)

    @property
    def offsets(self) -> list[int]:
        """Every token's position in its own request."""
        rows = [length for step in self.slab_steps for length in step.lengths]
        for chunk in self._chunks:
            rows += range(chunk.position, chunk.position + chunk.num_tokens)
        return rows

    @property
    def split(self) -> bool:
        """Whether the KV that tokens may see lies in more than one array."""
        tails = any(slab.has_tail for slab in self._slabs)
        return len(self._slabs) > 1 or bool(self._chunks) or tails

    def ask_window(self, window: int | None, num_tokens: int) -> None:
        """Record the mask width that the model requests from caches with this window."""
        self._asked[window] = num_tokens

    def write(self, layer: int, window: int | None, new: LayerKV) -> list[Seen]:
        """Write all tokens' KV; return the KV that each slab's rows may see, then each chunk's."""
        if not self.split:
            return [self._slabs[0].write(layer, self.slab_steps[0], new)]
        parts = [
            slab.write(layer, step, _rows(new, step.start, step.end))
            for slab, step in zip(self._slabs, self.slab_steps, strict=True)
        ]
        asked = self._asked.get(window)
        for chunk, start, end in self._chunk_rows():
            seen = chunk.write(layer, _rows(new, start, end), window=window, asked=asked)
            parts.append((seen,))
        return parts

    def attend(
        self,
        queries: mx.array,
        parts: Sequence[Seen],
        *,
        window: int | None,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend slab by slab, then chunk by chunk, to the result of ``write``."""
        count = len(self.slab_steps)
        attended = [
            _attend_slab(
                queries[step.start : step.end], seen, step, window=window, scale=scale, sinks=sinks
            )
            for step, seen in zip(self.slab_steps, parts[:count], strict=True)
        ]
        for (chunk, start, end), (seen,) in zip(self._chunk_rows(), parts[count:], strict=True):
            mask = chunk.mask(window)
            attended.append(
                chunk.attend(queries[start:end], seen, scale=scale, mask=mask, sinks=sinks)
            )
        return attended[0] if len(attended) == 1 else mx.concatenate(attended)

    def _chunk_rows(self) -> list[tuple[MixedChunk, int, int]]:
        """Return every chunk with its range of rows, start and end."""
        rows = []
        start = self.slab_steps[-1].end if self.slab_steps else 0
        for chunk in self._chunks:
            rows.append((chunk, start, start + chunk.num_tokens))
            start += chunk.num_tokens
        return rows


def _attend_slab(
    queries: mx.array,
    seen: Seen,
    step: SlabStep,
    *,
    window: int | None,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    kept, *tail = seen
    if tail:
        mask = step.folded.mask
        return attend_both(queries, kept, tail[0], scale=scale, mask=mask, sinks=sinks)
    mask = step.place(window).mask
    return mx.fast.scaled_dot_product_attention(
        queries, kept.keys, kept.values, scale=scale, mask=mask, sinks=sinks
    )


def _rows(new: LayerKV, start: int, end: int) -> LayerKV:
    return LayerKV(new.keys[start:end], new.values[start:end])
