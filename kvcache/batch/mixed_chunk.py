"""A chunk of a prompt in a decode step, or in one pass with chunks of other prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.kv_row import LayerKV


@dataclass(slots=True)
class MixedChunk:
    """The next ``num_tokens`` of one prompt, from ``position`` on, as the batch's last rows.

    Outside attention a token is a row, whatever its request. So one forward pass, which reads the
    weights once, serves decode and prefill. In attention the rows are one sequence again, over the
    KV in ``caches``: the model's own caches of that request, leaf by leaf.
    """

    caches: Sequence[Any]
    position: int
    num_tokens: int
    _masks: dict[int | None, Any] = field(default_factory=dict)

    def write(self, layer: int, new: LayerKV, *, window: int | None, asked: int | None) -> LayerKV:
        """Append rows [tokens, KV heads, 1, head dim]; return [1, KV heads, all, head dim].

        ``asked`` is the mask width that the model requests from a cache with this window.
        """
        turned = LayerKV(_transposed(new.keys), _transposed(new.values))
        return self.append(layer, turned, window=window, asked=asked)

    def append(self, layer: int, new: LayerKV, *, window: int | None, asked: int | None) -> LayerKV:
        """Append one row of tokens, [1, KV heads, tokens, head dim], as ``write`` does."""
        cache = self.caches[layer]
        if window not in self._masks:
            # Before the first write, since the mask depends on the length before it.
            self._masks[window] = cache.make_mask(
                self.num_tokens, return_array=False, window_size=asked
            )
        keys, values = cache.update_and_fetch(new.keys, new.values)
        return LayerKV(keys, values)

    def mask(self, window: int | None) -> Any:
        """Return None, "causal" or booleans [tokens, seen]."""
        return self._masks[window]

    def attend(
        self, queries: mx.array, seen: LayerKV, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attend with rows [tokens, heads, 1, head dim]; the result has that shape too."""
        return _transposed(
            mx.fast.scaled_dot_product_attention(
                _transposed(queries), seen.keys, seen.values, scale=scale, mask=mask, sinks=sinks
            )
        )


def _transposed(array: mx.array) -> mx.array:
    """Swap rows of one token and one row of tokens."""
    return array.transpose(2, 1, 0, 3)
