"""A chunk of a prompt that rides in a decode step."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_dp.kvcache.guest_chunk import GuestChunk
from mlx_dp.worker.prefill import Prefill


@dataclass(frozen=True, slots=True)
class Guest:
    """The chunk, its token ids [tokens], and the prompt that it is of."""

    prefill: Prefill
    chunk: GuestChunk
    ids: mx.array

    @classmethod
    def take(cls, prefill: Prefill, num_tokens: int) -> "Guest":
        """Take the next tokens of a prompt, which do not end it."""
        position = prefill.done
        ids = prefill.take(num_tokens)
        assert ids.size == num_tokens, (ids.size, num_tokens)
        return cls(prefill, GuestChunk(prefill.caches, position, num_tokens), ids)
