"""KV rows as plain numpy arrays, one request each, as a reference for batched caches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.kv_row import LayerKV

LAYERS = 2
KV_HEADS = 2
QUERY_HEADS = 4
KEY_DIM = 4
VALUE_DIM = 3
SCALE = 0.5
PLAIN: tuple[int | None, ...] = (None,) * LAYERS
"""Both layers keep every token."""
MIXED: tuple[int | None, ...] = (None, 6, 3)
"""Windows that are narrower and wider than the narrowest slabs of the tests."""


@dataclass(slots=True)
class PlainRow:
    """All tokens of one row: per layer, keys and values [KV heads, tokens, dim].

    Layers with a window attend to the last of them only, and have only those as content.
    """

    layers: list[tuple[np.ndarray, np.ndarray]]
    windows: Sequence[int | None] = PLAIN

    @property
    def length(self) -> int:
        return int(self.layers[-1][0].shape[1])

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        old_keys, old_values = self.layers[layer]
        self.layers[layer] = (
            np.concatenate([old_keys, keys], axis=1),
            np.concatenate([old_values, values], axis=1),
        )

    def ring(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that the layer keeps, each at its position modulo the window."""
        keys, values = self.layers[layer]
        window = self.windows[layer]
        if window is None:
            return keys, values
        kept = min(window, keys.shape[1])
        rings = np.empty_like(keys[:, :kept]), np.empty_like(values[:, :kept])
        for token in range(keys.shape[1]):
            for ring, whole in zip(rings, (keys, values), strict=True):
                ring[:, token % window] = whole[:, token]
        return rings

    def content(self) -> list[LayerKV]:
        return [
            LayerKV(*(mx.array(array[None]) for array in self.ring(layer)))
            for layer in range(len(self.layers))
        ]

    def attend(self, layer: int, queries: np.ndarray, length: int) -> np.ndarray:
        """Attention of the last tokens up to ``length``, with queries [query heads, key dim]."""
        window = self.windows[layer]
        start = 0 if window is None else max(0, length - window)
        keys, values = (
            np.repeat(array[:, start:length].astype(np.float64), QUERY_HEADS // KV_HEADS, axis=0)
            for array in self.layers[layer]
        )
        scores = SCALE * np.einsum("hd,htd->ht", queries.astype(np.float64), keys)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("ht,htd->hd", weights, values)


@dataclass(slots=True)
class PlainPrompt:
    """A partly prefilled prompt: its tokens so far, and the same in mlx-lm's own caches."""

    row: PlainRow
    caches: list[Any] = field(default_factory=list)

    def chunk(self, num_tokens: int) -> MixedChunk:
        return MixedChunk(self.caches, self.row.length, num_tokens)


def random_row(
    rng: np.random.Generator, length: int, windows: Sequence[int | None] = PLAIN
) -> PlainRow:
    return PlainRow(
        [
            (
                rng.standard_normal((KV_HEADS, length, KEY_DIM), dtype=np.float32),
                rng.standard_normal((KV_HEADS, length, VALUE_DIM), dtype=np.float32),
            )
            for _ in windows
        ],
        windows,
    )


def empty_prompt(rng: np.random.Generator, windows: Sequence[int | None] = PLAIN) -> PlainPrompt:
    return PlainPrompt(random_row(rng, 0, windows), own_caches(windows))


def own_caches(windows: Sequence[int | None]) -> list[Any]:
    """The caches that a model with these layers makes for a single request."""
    return [
        KVCache() if window is None else RotatingKVCache(window)  # type: ignore[no-untyped-call]
        for window in windows
    ]
