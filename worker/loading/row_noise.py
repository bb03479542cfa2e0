"""Logits of prompts in mlx-lm's own caches, and this device's rounding noise."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.loading.rounding import difference

WIDTHS: Final = (4, 24)
"""Few rows and many: devices choose kernels by the number of rows."""


def prefilled(loaded: LoadedModel, prompt: list[int], *, rows: int = 1) -> list[Any]:
    """Return the caches after a prompt, of one row or of several equal rows."""
    caches: list[Any] = make_prompt_cache(loaded.model)
    loaded.model(mx.array([prompt] * rows, dtype=mx.int32), cache=caches)
    return caches


def continued(
    loaded: LoadedModel, caches: list[Any], tokens: Sequence[int], *, rows: int = 1
) -> mx.array:
    """Return logits [rows, tokens, vocab] of the next tokens, one pass each."""
    steps = []
    for token in tokens:
        ids = mx.array([[token]] * rows, dtype=mx.int32)
        steps.append(loaded.model(ids, cache=caches)[:, -1])
    return mx.stack(steps, axis=1)


def decode_noise(loaded: LoadedModel, prompt: list[int], tokens: Sequence[int]) -> float:
    """Return the difference in logits between one row that decodes and several equal rows.

    Only the shapes of the products differ, so the difference is rounding.
    """
    (alone,) = continued(loaded, prefilled(loaded, prompt), tokens)

    def together(rows: int) -> list[mx.array]:
        caches = _repeated(loaded, prefilled(loaded, prompt), rows)
        return list(continued(loaded, caches, tokens, rows=rows))

    return max(difference([alone] * rows, together(rows)) for rows in WIDTHS)


def prefill_noise(loaded: LoadedModel, prompt: list[int], tokens: Sequence[int]) -> float:
    """As ``decode_noise``, for equal rows that are also prefilled together."""
    (alone,) = continued(loaded, prefilled(loaded, prompt), tokens)

    def together(rows: int) -> list[mx.array]:
        caches = prefilled(loaded, prompt, rows=rows)
        return list(continued(loaded, caches, tokens, rows=rows))

    return max(difference([alone] * rows, together(rows)) for rows in WIDTHS)


def _repeated(loaded: LoadedModel, caches: list[Any], rows: int) -> list[Any]:
    """Replace the one row in the caches by several equal rows."""
    layout = loaded.layout
    for leaf, cache in zip(layout.leaves, layout.flatten(caches), strict=True):
        leaf.kind.repeat(cache, rows)
    return caches
