"""The prefill part of one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.worker.contract.engine import PrefillChunk
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill, PromptChunk

MIXED_TOKENS: Final = 64
"""A longer chunk has a forward pass of its own: in a decode step the LM head would run on all its
tokens, which costs more than one reading of the weights saves."""
TOGETHER_TOKENS: Final = 512
"""Short prompts share a forward pass up to this many tokens in total, padding included."""
PADDING_TOKENS: Final = 32
PADDING_SHARE: Final = 0.25
"""A shared pass may have PADDING_TOKENS of padding plus this share of its real tokens: another pass
would read all weights again, which costs about as much."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A chunk that ends its prompt and will share a forward pass with others."""

    prefill: Prefill
    chunk: PrefillChunk
    done: Callable[[], None]


class PrefillStep:
    """Launches a plan's chunks in order.

    A short chunk that does not end its prompt is mixed into the decode's forward pass. Short chunks
    that end their prompts share a forward pass before the decode, so that their requests draw a
    token in this step. All others run alone, as do all chunks of models whose states would treat
    padding as tokens.
    """

    def __init__(self, caches: DecodeCaches, segments: Segments, *, decoding: bool) -> None:
        self._caches = caches
        self._segments = segments
        self._mixes = decoding and caches.mixes_chunks
        self._mixed: list[PromptChunk] = []
        self._together: list[_Waiting] = []
        self.fence: mx.array | None = None
        """Evaluated once the last chunk that ran alone is done."""

    def run(self, prefill: Prefill, chunk: PrefillChunk, done: Callable[[], None]) -> None:
        """Launch a chunk, now or with others in ``finish``. ``done`` is called after the prompt's
        last chunk.
        """
        if chunk.prefix is not None:
            if self._is_unsaved(chunk.prefix):
                self._run_together()
            prefill.reuse(chunk.prefix, self._segments)
        ends = prefill.ends_with(chunk.num_tokens)
        shares = self._caches.mixes_chunks or self._caches.pads
        short = shares and chunk.num_tokens <= MIXED_TOKENS
        plain = chunk.snapshot is None and not chunk.saves
        fits = self._mixes and self._mixed_tokens + chunk.num_tokens <= MIXED_TOKENS
        if short and plain and fits and not prefill.completes_with(chunk.num_tokens):
            mixed = PromptChunk.cut_from(prefill, chunk.num_tokens)
            assert mixed is not None, "a chunk that does not end its prompt has tokens to run"
            self._mixed.append(mixed)
            return
        if short and ends:
            self._together.append(_Waiting(prefill, chunk, done))
            return
        self.fence = prefill.run(chunk.num_tokens)
        self._after(prefill, chunk, done)

    def finish(self) -> list[PromptChunk]:
        """Launch the chunks that share passes; return the chunks to mix into the decode."""
        self._run_together()
        return self._mixed

    @staticmethod
    def save(
        prefill: Prefill, saves: tuple[Save, ...], snapshot: int | None, segments: Segments
    ) -> None:
        """Copy the present content of a prompt's caches into segments and a snapshot."""
        mx.async_eval(segments.save_row(saves, prefill.saved_kv, snapshot, prefill.snapshot))

    @property
    def _mixed_tokens(self) -> int:
        return sum(chunk.chunk.num_tokens for chunk in self._mixed)

    def _is_unsaved(self, prefix: CachedPrefix) -> bool:
        """Whether a chunk that has not been launched saves a part of the prefix."""
        chunks = [one.chunk for one in self._together]
        saved = {save.segment for chunk in chunks for save in chunk.saves}
        if any(piece.segment in saved for piece in prefix.pieces):
            return True
        taken = {chunk.snapshot for chunk in chunks if chunk.snapshot is not None}
        return prefix.snapshot in taken

    def _run_together(self) -> None:
        waiting, self._together = self._together, []
        if self._caches.pads:
            # Chunks of similar length need the least padding.
            waiting.sort(key=lambda one: one.chunk.num_tokens)
        group: list[_Waiting] = []
        for one in waiting:
            if group and not self._fits([*group, one]):
                self._run_group(group)
                group = []
            group.append(one)
        if group:
            self._run_group(group)

    def _fits(self, group: Sequence[_Waiting]) -> bool:
        """Whether one pass can run these chunks."""
        sizes = [one.chunk.num_tokens for one in group]
        real = sum(sizes)
        if not self._caches.pads:
            return real <= TOGETHER_TOKENS
        run = len(sizes) * max(sizes)
        return run <= TOGETHER_TOKENS and run - real <= PADDING_TOKENS + PADDING_SHARE * real

    def _run_group(self, group: list[_Waiting]) -> None:
        if len(group) == 1:
            self.fence = group[0].prefill.run(group[0].chunk.num_tokens)
        else:
            taken = [PromptChunk.cut_from(one.prefill, one.chunk.num_tokens) for one in group]
            if chunks := [chunk for chunk in taken if chunk is not None]:
                self._caches.run_chunks(chunks)
        for one in group:
            self._after(one.prefill, one.chunk, one.done)

    def _after(self, prefill: Prefill, chunk: PrefillChunk, done: Callable[[], None]) -> None:
        if chunk.saves or chunk.snapshot is not None:
            self.save(prefill, chunk.saves, chunk.snapshot, self._segments)
        if prefill.complete:
            done()
