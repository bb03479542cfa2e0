"""Leaves one rank's share of the weights in a model's MLP and expert blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_dp.worker.sharded_block import BlockRecord, BlockRunner, ShardedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """The sharded blocks of a model by index, and in which order a forward pass calls them.

    ``calls`` may name a block several times: some models go through their layers again.
    """

    blocks: Sequence[ShardedBlock]
    records: tuple[BlockRecord, ...]
    calls: tuple[int, ...]
    whole_nbytes: int
    kept_nbytes: int


def shard_model(model: Any, *, rank: int, size: int, runner: BlockRunner) -> ShardedModel:
    """Put sharded blocks in place, evaluate them, and let go of what other ranks hold.

    The model's weights are lazy still, or its peak of memory is that of the whole. Raises
    UnsupportedModelError for a model that cannot be sharded, with the layer and the reason.
    """
    raise NotImplementedError
