"""Loaded tiny models, and their output for a single request, with logits."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.batch import attention
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.worker.contract.engine import PrefillChunk
from mlx_dp.worker.engine.prefill import Prefill
from mlx_dp.worker.loading.batch_check import choose_form
from mlx_dp.worker.loading.loaded_model import LoadedModel, inspect
from tests.support.models.tiny_models import ARCHITECTURES

KINDS = ("llama", "gemma3_text", "qwen3_next", "falcon_h1", "baichuan_m1", "gear", "mamba")
"""KV, windows, states, lists of both, all three, and states only."""


@cache
def loaded_tiny(name: str) -> LoadedModel:
    """The same model at every call: tests do not change it."""
    attention.install()
    return inspect(ARCHITECTURES[name].build(), ARCHITECTURES[name].config)


@cache
def form_of(name: str) -> BatchForm:
    """The form that the start chooses for it."""
    return choose_form(loaded_tiny(name))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [4 + (37 * salt + 11 * at + at * at) % 250 for at in range(length)]


class Alone:
    """One request in the model's own caches, as mlx-lm's single-request generation runs it."""

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int]) -> None:
        self._model = loaded.model
        self.caches: list[Any] = make_prompt_cache(loaded.model)
        self.tokens = list(prompt)
        if len(prompt) > 1:
            self._model(mx.array([list(prompt[:-1])], dtype=mx.int32), cache=self.caches)

    def next_logits(self) -> np.ndarray:
        """Run the newest token; the next one is arbitrary, the same in every run."""
        logits = self._model(mx.array([self.tokens[-1:]], dtype=mx.int32), cache=self.caches)
        self.tokens.append(4 + (7 * len(self.tokens)) % 250)
        return np.array(logits[0, -1])


def prefilled(
    loaded: LoadedModel,
    prompt: Sequence[int],
    chunks: Sequence[int] = (),
    *,
    prefix: CachedPrefix | None = None,
    segments: Segments | None = None,
) -> Prefill:
    """A whole prompt, in chunks of these sizes and the rest."""
    prefill = Prefill(loaded, prompt)
    if prefix is not None:
        assert segments is not None, "a prefix lies in segments"
        prefill.reuse(prefix, segments)
    for num_tokens in chunks:
        prefill.run(num_tokens)
    cached = prefix.num_tokens if prefix is not None else 0
    prefill.run(len(prompt) - cached - sum(chunks))
    return prefill


def whole(slot: int, prompt: Sequence[int]) -> PrefillChunk:
    return PrefillChunk(slot=slot, num_tokens=len(prompt))
