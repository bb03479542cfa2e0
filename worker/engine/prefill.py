"""The prompt of one request, run alone before it joins the batch."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.kvcache.row_content import (
    RowContent,
    Snapshot,
    cache_arrays,
    fill_caches,
    make_room,
    read_caches,
)
from mlx_dp.worker.loading.loaded_model import LoadedModel


class Prefill:
    """Fills the model's own caches with a prompt, chunk by chunk, unpadded and width 1.

    This is what mlx-lm's single-request generation does, so the KV is the same; that of a chunk
    mixed into a decode is the same up to rounding. The last token of the prompt is left over:
    it is the first that the batch decodes.
    """

    def __init__(self, loaded: LoadedModel, ids: Sequence[int]) -> None:
        self._model = loaded.model
        self._layout = loaded.layout
        self._ids = mx.array(list(ids), dtype=mx.int32)
        self._launched = 0
        self.caches: list[Any] = make_prompt_cache(loaded.model)
        make_room(self._layout, self.caches, len(ids))

    @property
    def leaves(self) -> list[Any]:
        """The caches leaf by leaf."""
        return self._layout.flatten(self.caches)

    @property
    def done(self) -> int:
        """Tokens that the caches hold."""
        return min(self._launched, self._ids.size - 1)

    @property
    def complete(self) -> bool:
        return self._launched == self._ids.size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in cache_arrays(self.caches))

    def reuse(self, prefix: CachedPrefix, segments: Segments) -> None:
        """Begin behind a prefix that was computed before."""
        assert not self._launched, "the prompt has begun"
        assert prefix.num_tokens < self._ids.size, (prefix.num_tokens, self._ids.size)
        fill_caches(
            self._layout,
            self.caches,
            segments.read(prefix),
            None if prefix.snapshot is None else segments.restore(prefix.snapshot),
            length=prefix.num_tokens,
            room=self._ids.size,
        )
        self._launched = prefix.num_tokens

    def content(self) -> RowContent | None:
        """What the caches hold, not copied; None while a state has not been written."""
        return read_caches(self._layout, self.caches, self.done) if self.done else None

    def saved_kv(self, save: Save) -> list[LayerKV]:
        """The KV of some tokens, as views."""
        content = self.content()
        assert content is not None, "the caches hold nothing"
        return content.saved_kv(save.start, save.end)

    def snapshot(self) -> Snapshot | None:
        """Windows and states as they are now, as views; None: there are none yet."""
        content = self.content()
        return None if content is None else content.recent

    def ends_with(self, num_tokens: int) -> bool:
        """The next ``num_tokens`` tokens leave nothing, or only the last one, of the prompt."""
        return self._launched + num_tokens >= self._ids.size - 1

    def completes_with(self, num_tokens: int) -> bool:
        """The next ``num_tokens`` tokens are all that is left of the prompt."""
        return self._launched + num_tokens >= self._ids.size

    def share(self, num_tokens: int) -> float:
        """What the next ``num_tokens`` tokens are of those that are still to be run."""
        return min(1.0, num_tokens / max(1, self._ids.size - 1 - self._launched))

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

        Returns an array that is there once the chunk is, or None when nothing was launched. It
        holds none of the KV, so that the next chunk is written in place.
        """
        chunk = self.take(num_tokens)
        if chunk.size == 0:
            return None
        # Nothing needs the logits, so the LM head is never computed.
        self._model(chunk[None], cache=self.caches)
        arrays = self.arrays()
        written = next(array for array in reversed(arrays) if array.size)
        fence: mx.array = written[(0,) * written.ndim] + 0
        mx.async_eval(arrays, fence)
        return fence

    def arrays(self) -> list[mx.array]:
        """What must be evaluated after each chunk, or the graph would pile up."""
        return cache_arrays(self.caches)
