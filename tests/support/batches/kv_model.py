"""A step of a model with ordinary attention, each row compared with its own attention in numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dp.kvcache.batch.kv_batch import KVBatch
from mlx_dp.kvcache.batch.kv_step import KVStep
from mlx_dp.kvcache.batch.slab_step import SlabStep
from mlx_dp.kvcache.kv_row import LayerKV
from tests.support.batches.kv_reference import (
    KEY_DIM,
    KV_HEADS,
    QUERY_HEADS,
    SCALE,
    VALUE_DIM,
    PlainPrompt,
    PlainRow,
)

Chunks = Sequence[tuple[PlainPrompt, int]]
"""Guests with the number of tokens that each runs."""


@dataclass(frozen=True, slots=True)
class _Token:
    """The row of each token in the step, and how many tokens that row has with it."""

    row: PlainRow
    length: int


def run_step(
    batch: KVBatch,
    rows: Mapping[int, PlainRow],
    rng: np.random.Generator,
    chunks: Chunks = (),
    *,
    decode: bool = True,
) -> None:
    """One step of the batch, with or without the prompts' chunks and the rows."""
    mixed = [prompt.chunk(num_tokens) for prompt, num_tokens in chunks]
    order = batch.begin_step(mixed, decode=decode)
    assert sorted(order) == (sorted(rows) if decode else [])
    tokens = [_Token(rows[key], rows[key].length + 1) for key in order]
    for prompt, num_tokens in chunks:
        done = prompt.row.length
        tokens += [_Token(prompt.row, done + at + 1) for at in range(num_tokens)]
    step = batch.caches[0].step
    expect_places(step, [rows[key].length for key in order])
    for layer, cache in enumerate(batch.caches):
        assert cache.offset.tolist() == [token.length - 1 for token in tokens]
        _run_layer(layer, cache, tokens, rng)
    batch.end_step()


def _run_layer(layer: int, cache: Any, tokens: Sequence[_Token], rng: np.random.Generator) -> None:
    keys, values, queries = (
        rng.standard_normal((len(tokens), heads, 1, dim), dtype=np.float32)
        for heads, dim in ((KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM), (QUERY_HEADS, KEY_DIM))
    )
    mask = cache.make_mask(1, window_size=tokens[0].row.windows[layer])
    fetched = LayerKV(*cache.update_and_fetch(mx.array(keys), mx.array(values)))
    for index, token in enumerate(tokens):
        token.row.append(layer, keys[index], values[index])
    if cache.split:
        found = cache.attend(mx.array(queries), fetched, scale=SCALE, sinks=None)
    else:
        expect_rectangle(fetched, [token.row for token in tokens], layer)
        found = mx.fast.scaled_dot_product_attention(
            mx.array(queries), *fetched, scale=SCALE, mask=mask
        )
    for index, token in enumerate(tokens):
        expected = token.row.attend(layer, queries[index, :, 0], token.length)
        np.testing.assert_allclose(np.array(found[index, :, 0]), expected, atol=1e-5)


def feed(caches: Sequence[Any], row: PlainRow, num_tokens: int, rng: np.random.Generator) -> None:
    """Run a chunk as mlx-lm does for one request; compare it with the row's own attention."""
    for layer, cache in enumerate(caches):
        keys, values, queries = (
            rng.standard_normal((1, heads, num_tokens, dim), dtype=np.float32)
            for heads, dim in ((KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM), (QUERY_HEADS, KEY_DIM))
        )
        mask = cache.make_mask(num_tokens, return_array=False, window_size=row.windows[layer])
        seen = cache.update_and_fetch(mx.array(keys), mx.array(values))
        row.append(layer, keys[0], values[0])
        found = mx.fast.scaled_dot_product_attention(
            mx.array(queries), *seen, scale=SCALE, mask=mask
        )
        length = row.layers[layer][0].shape[1]
        for at in range(num_tokens):
            expected = row.attend(layer, queries[0, :, at], length - num_tokens + at + 1)
            np.testing.assert_allclose(np.array(found[0, :, at]), expected, atol=1e-5)


def expect_places(step: KVStep, lengths: Sequence[int]) -> None:
    """The slabs follow one another, and each row attends to its own tokens only."""
    start = 0
    for slab in step.slab_steps:
        assert slab.start == start < slab.end
        assert slab.lengths == tuple(lengths[slab.start : slab.end])
        for window in (None, 1, 3, 6):
            expect_place(slab, window)
        start = slab.end
    assert start == len(lengths)


def expect_place(step: SlabStep, window: int | None) -> None:
    """Compare writes and masks with a ring of this window, token by token."""
    place = step.place(window)
    at = [length if window is None else length % window for length in step.lengths]
    if place.position is not None:
        assert at == [place.position] * len(at)
    else:
        assert place.positions is not None
        assert place.positions.tolist() == at
    kept = [length + 1 if window is None else min(length + 1, window) for length in step.lengths]
    assert place.visible == max(kept)
    _expect_mask(place.mask, [list(range(count)) for count in kept], place.visible)
    for num_tokens in (1, 2, 4, 9):
        recent = [
            [
                token if window is None else token % window
                for token in range(max(0, length + 1 - min(num_tokens, count)), length + 1)
            ]
            for length, count in zip(step.lengths, kept, strict=True)
        ]
        _expect_mask(step.recent(window, num_tokens), recent, place.visible)


def _expect_mask(mask: mx.array | None, seen: Sequence[Sequence[int]], visible: int) -> None:
    expected = np.zeros((len(seen), 1, 1, visible), dtype=bool)
    for row, places in enumerate(seen):
        expected[row, 0, 0, list(places)] = True
    if mask is None:
        assert expected.all()
    else:
        np.testing.assert_array_equal(np.array(mask), expected)


def expect_rectangle(fetched: LayerKV, rows: Sequence[PlainRow], layer: int) -> None:
    """Every row starts at index 0, with only zeros after its own tokens."""
    for found, own in zip(
        fetched, zip(*(row.ring(layer) for row in rows), strict=True), strict=True
    ):
        for index, tokens in enumerate(own):
            row = np.array(found[index])
            np.testing.assert_array_equal(row[:, : tokens.shape[1]], tokens)
            assert not row[:, tokens.shape[1] :].any()


def expect_content(batch: KVBatch, rows: Mapping[int, PlainRow]) -> None:
    for key, row in rows.items():
        assert batch.length(key) == row.length
        for layer, found in enumerate(batch.content(key)):
            for array, expected in zip(found, row.ring(layer), strict=True):
                np.testing.assert_array_equal(np.array(array[0]), expected)
