"""Checks, when a model is loaded, that padding does not affect its states."""

import logging
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.batch.batched_kv_cache import NotSplittableError
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.batch.padded_pass import PaddedPass
from mlx_dp.worker.contract.failure import is_model_fault
from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.loading.rounding import (
    MARGIN,
    TRIALS,
    Comparison,
    Trial,
    compare,
    difference,
    differences,
    max_of_medians,
    tolerance,
)
from mlx_dp.worker.loading.row_noise import continued, prefill_noise, prefilled

logger = logging.getLogger(__name__)

PROBE_TOKEN: Final = 5
CHUNKS: Final = ((12,), (2, 11), (9, 5), (0, 10))
"""Two passes over chunks of unequal length. One prompt has only the first chunk; one has only the
second, so it begins beside others that continue; one begins shorter than a convolution's history.
"""


def keeps_padding_out(loaded: LoadedModel) -> bool:
    """Whether prompts give the same results in padded passes as alone, for any padding."""
    try:
        fault = _fault(loaded)
    except NotSplittableError as error:
        fault = str(error)
    except Exception as error:
        if not is_model_fault(error):
            raise
        # After any error of a model file on padded rows, prompts run alone.
        logger.info("short prompts run alone: %s: %s", type(error).__name__, error)
        return False
    if fault is not None:
        logger.info("short prompts run alone, since %s", fault)
    return fault is None


def _fault(loaded: LoadedModel) -> str | None:
    """Return what is wrong with padded passes of this model; None: nothing."""
    token = PROBE_TOKEN % loaded.shape.vocab_size

    def trial(number: int) -> Trial:
        prompts = _prompts(loaded, number)
        alone = [continued(loaded, prefilled(loaded, prompt), [token])[0, 0] for prompt in prompts]
        return Trial.of(alone, _padded(loaded, prompts, padding=0))

    found = compare(
        trial, lambda number: prefill_noise(loaded, _prompts(loaded, number)[0], [token])
    )
    if not found.agrees:
        return f"padding changes logits by {found.worst:.2g}"
    leak = _leak(loaded)
    if not leak.agrees:
        return (
            f"padding changes logits by {leak.worst:.2g} when its tokens are others, and rounding "
            f"explains {leak.allowed:.2g}"
        )
    return None


def _leak(loaded: LoadedModel) -> Comparison:
    """Compare the effect of the padding's content on logits with that of other rows' content.

    Neither should matter to a row, and neither changes a shape. If a kernel's rounding does not
    depend on other rows at all, the padding's content must change nothing.
    """
    vocab, prompts = loaded.shape.vocab_size, _prompts(loaded, 0)
    found = _padded(loaded, prompts, padding=0)

    def moved(padding: int) -> list[float]:
        return differences(found, _padded(loaded, prompts, padding=padding))

    first = moved(vocab - 1)
    if not any(first):
        return Comparison(worst=0.0, allowed=0.0)
    worst = max_of_medians([first, moved(vocab // 2), moved(vocab // 3)])
    noise = max(
        _moved_by_others(loaded, found, number, half)
        for number in range(1, TRIALS + 1)
        for half in range(2)
    )
    allowed = min(MARGIN * noise, tolerance(found).least)
    return Comparison(worst=worst, allowed=allowed)


def _moved_by_others(loaded: LoadedModel, found: list[mx.array], number: int, half: int) -> float:
    """Return how far every second row's logits move when the other rows' prompts change."""
    pairs = zip(_prompts(loaded, 0), _prompts(loaded, number), strict=True)
    prompts = [same if row % 2 == half else other for row, (same, other) in enumerate(pairs)]
    return difference(found[half::2], _padded(loaded, prompts, padding=0)[half::2])


def _prompts(loaded: LoadedModel, trial: int) -> list[list[int]]:
    vocab = loaded.shape.vocab_size
    return [
        [(13 + 29 * row + 5 * i + 89 * trial) % vocab for i in range(sum(sizes))]
        for row, sizes in enumerate(CHUNKS)
    ]


def _padded(loaded: LoadedModel, prompts: list[list[int]], *, padding: int) -> list[mx.array]:
    """Return the logits [vocab] of one more token per prompt, after two padded passes."""
    rows: list[list[Any]] = [make_prompt_cache(loaded.model) for _ in prompts]
    done = [0] * len(prompts)
    for number in range(2):
        sizes = {
            row: chunks[number]
            for row, chunks in enumerate(CHUNKS)
            if number < len(chunks) and chunks[number]
        }
        padded = PaddedPass(
            loaded.layout,
            [
                MixedChunk(loaded.layout.flatten(rows[row]), position=done[row], num_tokens=size)
                for row, size in sizes.items()
            ],
        )
        tokens = [
            prompts[row][done[row] : done[row] + size] + [padding] * (padded.width - size)
            for row, size in sizes.items()
        ]
        loaded.model(mx.array(tokens, dtype=mx.int32), cache=padded.caches)
        padded.end()
        for row, size in sizes.items():
            done[row] += size
    token = PROBE_TOKEN % loaded.shape.vocab_size
    return [continued(loaded, caches, [token])[0, 0] for caches in rows]
