"""A prefill chunk that shares a forward pass with others."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.worker.engine.prefill import Prefill


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The chunk, its token ids [tokens], and its prefill."""

    prefill: Prefill
    chunk: MixedChunk
    ids: mx.array

    @classmethod
    def cut_from(cls, prefill: Prefill, num_tokens: int) -> "PromptChunk | None":
        """Take the next tokens of a prefill; None: only the prompt's last is left, which is not
        run.
        """
        position = prefill.done
        ids = prefill.take_ids(num_tokens)
        if ids.size == 0:
            return None
        return cls(prefill, MixedChunk(prefill.leaves, position, ids.size), ids)
