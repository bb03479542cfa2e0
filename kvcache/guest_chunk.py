"""A piece of a prompt that rides along in a decode step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.kv_row import LayerKV


@dataclass(frozen=True, slots=True)
class GuestChunk:
    """The next ``num_tokens`` of one prompt, from ``position`` on, as the batch's last rows.

    To everything but attention a token is a row, whoever's it is; so one forward pass, which
    reads the weights once, serves decode and prefill. In attention the rows are one sequence
    again, over the KV in ``caches``, the model's own caches of that request.
    """

    caches: Sequence[Any]
    position: int
    num_tokens: int

    def write(self, layer: int, new: LayerKV) -> LayerKV:
        """Append rows [tokens, KV heads, 1, head dim]; return [1, KV heads, all, head dim]."""
        keys, values = self.caches[layer].update_and_fetch(_turn(new.keys), _turn(new.values))
        return LayerKV(keys, values)

    def attend(
        self, queries: mx.array, seen: LayerKV, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend causally with rows [tokens, heads, 1, head dim]; the result is alike."""
        return _turn(
            mx.fast.scaled_dot_product_attention(
                _turn(queries), seen.keys, seen.values, scale=scale, mask="causal", sinks=sinks
            )
        )


def _turn(array: mx.array) -> mx.array:
    """From rows of one token to one row of tokens, and back."""
    return array.transpose(2, 1, 0, 3)
