"""All ranks of a sharded model in one process, which sums their shards directly."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.worker.shards.sharded_load import ShardedModel, shard_model


class LocalRanks:
    """A block runner that runs every rank's shard of the same block."""

    def __init__(self, build: Callable[[], Any], size: int, *, vocabulary: bool = False) -> None:
        self.ranks: list[ShardedModel] = []
        self.models = [build() for _ in range(size)]
        self.calls: list[int] = []
        for rank, model in enumerate(self.models):
            self.ranks.append(
                shard_model(model, rank=rank, size=size, runner=self, vocabulary=vocabulary)
            )

    def run(self, block: int, rows: mx.array, shard: Callable[[mx.array], mx.array]) -> mx.array:
        self.calls.append(block)
        shards = [rank.blocks[block].shard(rows) for rank in self.ranks]
        return sum(shards[1:], shards[0])


def logits(model: Any, tokens: list[int]) -> mx.array:
    """Return all logits of a pass over a prompt, with infinite ones as zeros."""
    output = model(mx.array([tokens]), cache=make_prompt_cache(model))
    return mx.where(mx.isinf(output), 0.0, output)


def relative_error(actual: mx.array, expected: mx.array) -> float:
    """Return the largest difference, in parts of the largest number."""
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())
