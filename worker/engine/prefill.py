"""The prefill of one request, before it joins the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
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
    """Fills the model's own caches with one prompt, chunk by chunk, without padding.

    mlx-lm's single-request generation does the same, so the KV is the same; the KV of a mixed chunk
    is the same up to rounding. The last token of the prompt is not prefilled: the batch decodes it
    first.
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
        """The number of tokens in the caches."""
        return min(self._launched, self._ids.size - 1)

    @property
    def complete(self) -> bool:
        return self._launched == self._ids.size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in cache_arrays(self.caches))

    def reuse(self, prefix: CachedPrefix, segments: Segments) -> None:
        """Start after a cached prefix."""
        assert not self._launched, "the prefill has begun"
        assert prefix.num_tokens < self._ids.size, (prefix.num_tokens, self._ids.size)
        fill_caches(
            self._layout,
            self.caches,
            segments.read_prefix(prefix),
            None if prefix.snapshot is None else segments.read_snapshot(prefix.snapshot),
            length=prefix.num_tokens,
            room=self._ids.size,
        )
        self._launched = prefix.num_tokens

    def content(self) -> RowContent | None:
        """Return the content of the caches, not copied; None: a state was not written yet."""
        return read_caches(self._layout, self.caches, self.done) if self.done else None

    def saved_kv(self, save: Save) -> list[LayerKV]:
        """Return views of the KV of some tokens."""
        content = self.content()
        assert content is not None, "the caches hold nothing"
        return content.saved_kv(save.start, save.end)

    def snapshot(self) -> Snapshot | None:
        """Return views of the present windows and states; None: there are none yet."""
        content = self.content()
        return None if content is None else content.recent

    def ends_with(self, num_tokens: int) -> bool:
        """Whether at most the prompt's last token remains after the next ``num_tokens`` tokens."""
        return self._launched + num_tokens >= self._ids.size - 1

    def completes_with(self, num_tokens: int) -> bool:
        """Whether the next ``num_tokens`` tokens complete the prompt."""
        return self._launched + num_tokens >= self._ids.size

    def share(self, num_tokens: int) -> float:
        """Return the share of the next ``num_tokens`` tokens in the tokens still to run."""
        return min(1.0, num_tokens / max(1, self._ids.size - 1 - self._launched))

    def take_ids(self, num_tokens: int) -> mx.array:
        """Count the next ``num_tokens`` tokens as launched; return the ids to run.

        The prompt's last token is counted but not run, so the result may be empty.
        """
        start = self.done
        self._launched += num_tokens
        assert self._launched <= self._ids.size, (self._launched, self._ids.size)
        return self._ids[start : self.done]

    def run(self, num_tokens: int) -> mx.array | None:
        """Launch the next ``num_tokens`` tokens in a forward pass of their own.

        Returns an array that is evaluated once the chunk is, or None when nothing was launched. It
        holds no reference to the KV, so the next chunk is written in place.
        """
        chunk = self.take_ids(num_tokens)
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
        """Return the arrays to evaluate after each chunk, or their graph would grow."""
        return cache_arrays(self.caches)


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
