"""The prompt of one request, run alone before it joins the batch."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_dp.kvcache.kv_row import LayerKV, filled


class Prefill:
    """Fills the model's own caches with a prompt, chunk by chunk, unpadded and width 1.

    This is what mlx-lm's single-request generation does, so the KV is the same; that of a chunk
    that rides in a decode is the same up to rounding. The last token of the prompt is left over:
    it is the first that the batch decodes.
    """

    def __init__(self, model: Any, ids: Sequence[int], *, room: int) -> None:
        self._model = model
        self._ids = mx.array(list(ids), dtype=mx.int32)
        self._launched = 0
        self.caches: list[Any] = make_prompt_cache(model)
        for cache in self.caches:
            if type(cache) is KVCache:
                # Room for the whole prompt at once; by default it copies itself every 256 tokens.
                cache.step = room

    def content(self) -> list[LayerKV] | None:
        """What the caches hold, or None for a prompt of one token, which fills nothing."""
        return filled(self.caches, self.done) if self.done else None

    @property
    def done(self) -> int:
        """Tokens that the caches hold."""
        return min(self._launched, self._ids.size - 1)

    @property
    def complete(self) -> bool:
        return self._launched == self._ids.size

    def ends_with(self, num_tokens: int) -> bool:
        """The next ``num_tokens`` tokens leave nothing, or only the last one, of the prompt."""
        return self._launched + num_tokens >= self._ids.size - 1

    def take(self, num_tokens: int) -> mx.array:
        """Count the next ``num_tokens`` tokens as launched, and return those of them to run.

        The prompt's last is counted, but not run, so there may be none.
        """
        start = self.done
        self._launched += num_tokens
        assert self._launched <= self._ids.size, (self._launched, self._ids.size)
        return self._ids[start : self.done]

    def run(self, num_tokens: int) -> mx.array | None:
        """Launch the next ``num_tokens`` tokens in a forward pass of their own.

        Returns a scalar that is there once the chunk is, or None when nothing was launched. It
        holds none of the KV, so that the next chunk is written in place.
        """
        chunk = self.take(num_tokens)
        if chunk.size == 0:
            return None
        # Nothing needs the logits, so the LM head is never computed.
        self._model(chunk[None], cache=self.caches)
        fence: mx.array = self.caches[-1].keys[0, 0, 0, 0] + 0
        mx.async_eval(self.state(), fence)
        return fence

    def state(self) -> list[Any]:
        """What must be evaluated after each chunk, or the graph would pile up."""
        return [cache.state for cache in self.caches]
