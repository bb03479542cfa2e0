"""Do this model's states keep padding out? Asked once, when it is loaded."""

import logging
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.batched_kv_cache import NotSplittableError
from mlx_dp.kvcache.guest_chunk import GuestChunk
from mlx_dp.kvcache.padded_pass import PaddedPass
from mlx_dp.worker.failure import says_of_model
from mlx_dp.worker.loaded_model import LoadedModel
from mlx_dp.worker.rounding import difference, tolerance

logger = logging.getLogger(__name__)

CHUNKS: Final = ((12,), (2, 11), (9, 5), (0, 10))
"""Two passes over chunks of unequal length. One prompt has only the first, one only the second,
so that it begins beside others that continue; one begins shorter than convolutions look back."""


def keeps_padding_out(loaded: LoadedModel) -> bool:
    """Prompts give the same in padded passes as alone, whatever the padding is.

    Other tokens in the padding leave all other arithmetic as it is, so they may change nothing.
    """
    try:
        alone = _alone(loaded)
        found = _padded(loaded, padding=0)
        other = _padded(loaded, padding=loaded.shape.vocab_size - 1)
        worst, leak = difference(alone, found), difference(found, other)
    except NotSplittableError as error:
        logger.info("short prompts run alone, since %s", error)
        return False
    except Exception as error:
        if not says_of_model(error):
            raise
        # Whatever a model file raises on padded rows, its prompts then run alone.
        logger.info("short prompts run alone: %s: %s", type(error).__name__, error)
        return False
    if worst > tolerance(alone) or leak:
        logger.info("short prompts run alone, since padding changes logits by %.2g", worst)
        return False
    return True


def _prompts(loaded: LoadedModel) -> list[list[int]]:
    vocab = loaded.shape.vocab_size
    return [
        [(13 + 29 * row + 5 * i) % vocab for i in range(sum(sizes))]
        for row, sizes in enumerate(CHUNKS)
    ]


def _alone(loaded: LoadedModel) -> list[mx.array]:
    rows = []
    for prompt in _prompts(loaded):
        caches: list[Any] = make_prompt_cache(loaded.model)
        loaded.model(mx.array([prompt], dtype=mx.int32), cache=caches)
        rows.append(caches)
    return _continued(loaded, rows)


def _padded(loaded: LoadedModel, *, padding: int) -> list[mx.array]:
    prompts = _prompts(loaded)
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
                GuestChunk(loaded.layout.flatten(rows[row]), position=done[row], num_tokens=size)
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
    return _continued(loaded, rows)


def _continued(loaded: LoadedModel, rows: list[list[Any]]) -> list[mx.array]:
    """Logits [vocab] of one more token for each, alone, in mlx-lm's own caches."""
    token = mx.array([[5 % loaded.shape.vocab_size]], dtype=mx.int32)
    return [loaded.model(token, cache=caches)[0, -1] for caches in rows]
