"""One forward pass over chunks of several prompts, each a row that is padded to the longest."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.batch.slab_step import SlabStep
from mlx_dp.kvcache.kv_row import LayerKV


class PaddedStep:
    """Writes KV and attends chunk by chunk, as a ``KVStep`` does slab by slab.

    Attention never sees the padding, and needs no mask for it.
    """

    def __init__(self, chunks: Sequence[MixedChunk]) -> None:
        self._chunks = tuple(chunks)
        self._asked: dict[int | None, int] = {}
        self.width = max(chunk.num_tokens for chunk in chunks)
        self.slab_steps: Sequence[SlabStep] = ()

    @property
    def split(self) -> bool:
        """Always true: each chunk's KV is an array of its own."""
        return True

    def ask_window(self, window: int | None, num_tokens: int) -> None:
        """Record the mask width that the model requests from caches with this window."""
        self._asked[window] = num_tokens

    def write(self, layer: int, window: int | None, new: LayerKV) -> list[tuple[LayerKV, ...]]:
        """Append each row's real tokens to its own caches; return the KV that each may see.

        ``new`` is [rows, KV heads, tokens, head dim].
        """
        asked = self._asked.get(window)
        parts: list[tuple[LayerKV, ...]] = []
        for row, chunk in enumerate(self._chunks):
            own = LayerKV(new.keys[row : row + 1], new.values[row : row + 1])
            real = own.tokens(0, chunk.num_tokens)
            parts.append((chunk.append(layer, real, window=window, asked=asked),))
        return parts

    def attend(
        self,
        queries: mx.array,
        parts: Sequence[tuple[LayerKV, ...]],
        *,
        window: int | None,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend row by row to the result of ``write``; zeros behind a chunk's end."""
        attended = []
        for row, (chunk, (seen,)) in enumerate(zip(self._chunks, parts, strict=True)):
            found = mx.fast.scaled_dot_product_attention(
                queries[row : row + 1, :, : chunk.num_tokens],
                seen.keys,
                seen.values,
                scale=scale,
                mask=chunk.mask(window),
                sinks=sinks,
            )
            behind = self.width - chunk.num_tokens
            attended.append(mx.pad(found, [(0, 0), (0, 0), (0, behind), (0, 0)]))
        return mx.concatenate(attended)
