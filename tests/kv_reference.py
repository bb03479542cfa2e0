"""KV rows as plain numpy arrays, one request each, to hold batched caches to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_dp.kvcache.kv_batch import KVBatch
from mlx_dp.kvcache.kv_row import LayerKV

LAYERS = 2
KV_HEADS = 2
QUERY_HEADS = 4
KEY_DIM = 4
VALUE_DIM = 3
SCALE = 0.5


@dataclass(slots=True)
class PlainRow:
    """All tokens of one row: per layer, keys and values [KV heads, tokens, dim]."""

    layers: list[tuple[np.ndarray, np.ndarray]]

    @property
    def length(self) -> int:
        return int(self.layers[0][0].shape[1])

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        old_keys, old_values = self.layers[layer]
        self.layers[layer] = (
            np.concatenate([old_keys, keys], axis=1),
            np.concatenate([old_values, values], axis=1),
        )

    def content(self) -> list[LayerKV]:
        return [
            LayerKV(mx.array(keys[None]), mx.array(values[None])) for keys, values in self.layers
        ]

    def attend(self, layer: int, queries: np.ndarray) -> np.ndarray:
        """Attention of one token's queries [query heads, key dim] over the whole row."""
        keys, values = (
            np.repeat(array.astype(np.float64), QUERY_HEADS // KV_HEADS, axis=0)
            for array in self.layers[layer]
        )
        scores = SCALE * np.einsum("hd,htd->ht", queries.astype(np.float64), keys)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("ht,htd->hd", weights, values)


def random_row(rng: np.random.Generator, length: int) -> PlainRow:
    return PlainRow(
        [
            (
                rng.standard_normal((KV_HEADS, length, KEY_DIM), dtype=np.float32),
                rng.standard_normal((KV_HEADS, length, VALUE_DIM), dtype=np.float32),
            )
            for _ in range(LAYERS)
        ]
    )


def run_step(batch: KVBatch, rows: Mapping[int, PlainRow], rng: np.random.Generator) -> None:
    """One step of a model that attends as most do, held to each row's own attention."""
    order = batch.begin_step()
    assert sorted(order) == sorted(rows)
    expect_masks(batch, [rows[key].length for key in order])
    offsets = [rows[key].length for key in order]
    for layer, cache in enumerate(batch.caches):
        assert cache.offset.tolist() == offsets
        shape = (len(order), KV_HEADS, 1)
        keys = rng.standard_normal((*shape, KEY_DIM), dtype=np.float32)
        values = rng.standard_normal((*shape, VALUE_DIM), dtype=np.float32)
        queries = rng.standard_normal((len(order), QUERY_HEADS, 1, KEY_DIM), dtype=np.float32)
        mask = cache.make_mask(1)
        fetched = LayerKV(*cache.update_and_fetch(mx.array(keys), mx.array(values)))
        for index, key in enumerate(order):
            rows[key].append(layer, keys[index], values[index])
        if cache.split:
            found = cache.attend(mx.array(queries), fetched, scale=SCALE, sinks=None)
        else:
            expect_rectangle(fetched, [rows[key] for key in order], layer)
            found = mx.fast.scaled_dot_product_attention(
                mx.array(queries), *fetched, scale=SCALE, mask=mask
            )
        for index, key in enumerate(order):
            expected = rows[key].attend(layer, queries[index, :, 0])
            np.testing.assert_allclose(np.array(found[index, :, 0]), expected, atol=1e-5)
    batch.end_step()


def expect_masks(batch: KVBatch, lengths: Sequence[int]) -> None:
    """The step's slabs follow one another, and each row may look at its own tokens alone."""
    start = 0
    for step in batch.steps:
        assert step.start == start < step.end
        own = np.array(lengths[step.start : step.end])
        allowed = np.arange(step.visible) <= own[:, None]
        if step.mask is None:
            assert allowed.all()
        else:
            np.testing.assert_array_equal(np.array(step.mask), allowed[:, None, None])
        start = step.end
    assert start == len(lengths)


def expect_rectangle(fetched: LayerKV, rows: Sequence[PlainRow], layer: int) -> None:
    """Every row starts at index 0, with nothing but zeros behind its own tokens."""
    for found, own in zip(
        fetched, zip(*(row.layers[layer] for row in rows), strict=True), strict=True
    ):
        for index, tokens in enumerate(own):
            row = np.array(found[index])
            np.testing.assert_array_equal(row[:, : tokens.shape[1]], tokens)
            assert not row[:, tokens.shape[1] :].any()


def expect_content(batch: KVBatch, rows: Mapping[int, PlainRow]) -> None:
    for key, row in rows.items():
        for found, expected in zip(batch.content(key), row.layers, strict=True):
            np.testing.assert_array_equal(np.array(found.keys[0]), expected[0])
            np.testing.assert_array_equal(np.array(found.values[0]), expected[1])
