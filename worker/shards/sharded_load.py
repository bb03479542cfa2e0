"""Reduces a model's MLP and expert blocks to one rank's share of the weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.loading.model_measure import weights_nbytes
from mlx_dp.worker.shards.block_finder import FoundBlock, find_blocks
from mlx_dp.worker.shards.block_trace import BlockTrace, trace_blocks
from mlx_dp.worker.shards.projections import Fusion, Projections, put
from mlx_dp.worker.shards.row_arguments import RowArguments
from mlx_dp.worker.shards.shard_proof import block_slices, prove
from mlx_dp.worker.shards.sharded_block import BlockRecord, BlockRunner, ShardedBlock
from mlx_dp.worker.shards.vocabulary import VocabularyLayer, find_vocabulary
from mlx_dp.worker.shards.vocabulary_shard import shard_vocabulary

_ADVICE: Final = "use data-parallel replicas: leave out --enable-dp-attention"


class Shard(Protocol):
    """A rank's part of a block, on the rows of all ranks."""

    def shard(self, rows: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """The sharded blocks of a model, and the order of their calls in a forward pass.

    ``calls`` are indices of blocks. A block may occur several times: some models reuse layers.
    """

    blocks: tuple[Shard, ...]
    records: tuple[BlockRecord, ...]
    calls: tuple[int, ...]
    whole_nbytes: int
    kept_nbytes: int


def shard_model(
    model: Any, *, rank: int, size: int, runner: BlockRunner, vocabulary: bool = False
) -> ShardedModel:
    """Put sharded blocks in place, evaluate them, and free the parts of other ranks.

    ``vocabulary``: embedding and head are divided too. The model's weights must be lazy, or the
    memory peak is that of the whole model. Raises UnsupportedModelError for a model that cannot be
    sharded, with the layer and the reason.
    """
    found, trace = _blocks(model, size)
    words = find_vocabulary(model) if vocabulary else None
    whole = weights_nbytes(model)
    blocks: list[Shard] = []
    records: list[BlockRecord] = []
    indices: dict[str, int] = {}
    for block, fusion in _proven(found, trace, size):
        indices[block.name] = len(blocks)
        records.append(_record(block, trace.arguments[block.name], rank, size))
        _keep(block, rank, size, fusion)
        sharded = ShardedBlock(len(blocks), block.module, runner, trace.arguments[block.name])
        block.replace_with(sharded)
        blocks.append(sharded)
    calls = [indices[call.name] for call in trace.calls if call.name in indices]
    if words is not None:
        calls = [len(blocks), *calls, len(blocks) + 1]
        ends, their_records = shard_vocabulary(words, rank, size, runner, len(blocks))
        blocks += ends
        records += their_records
    return ShardedModel(
        blocks=tuple(blocks),
        records=tuple(records),
        calls=tuple(calls),
        whole_nbytes=whole,
        kept_nbytes=weights_nbytes(model),
    )


def shard_nbytes(model: Any, size: int, *, vocabulary: bool = False) -> tuple[int, ...]:
    """Return the bytes of weights that each rank would hold. Nothing is evaluated.

    Raises UnsupportedModelError like ``shard_model``, except for faults that only weights show.
    """
    found, _ = _blocks(model, size)
    whole = weights_nbytes(model)
    divided: list[Projections | VocabularyLayer] = [p for b in found for p in b.projections]
    if vocabulary:
        divided += find_vocabulary(model).layers
    return tuple(
        whole + sum(p.kept_nbytes(rank, size) - p.nbytes for p in divided) for rank in range(size)
    )


def _blocks(model: Any, size: int) -> tuple[list[FoundBlock], BlockTrace]:
    """Find the blocks that a pass calls, and how it calls them."""
    try:
        found = find_blocks(model)
        trace = trace_blocks(model, found)
        used = list(_called(found, {block.name for block in trace.calls}))
        if not used:
            raise UnsupportedModelError("no layer has an MLP or experts that could be divided")
        for projections in (p for block in used for p in block.projections):
            projections.check_size(size)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"this model cannot be sharded: {error}; {_ADVICE}") from error
    return used, trace


def _record(block: FoundBlock, arguments: RowArguments, rank: int, size: int) -> BlockRecord:
    nbytes = weights_nbytes(block.module)
    saved = sum(p.nbytes - p.kept_nbytes(rank, size) for p in block.projections)
    return BlockRecord(
        name=block.name,
        width=arguments.width,
        dtype=arguments.dtype,
        output_width=arguments.output.size,
        output_dtype=arguments.output.dtype,
        nbytes=nbytes,
        kept_nbytes=nbytes - saved,
    )


def _called(blocks: Sequence[FoundBlock], names: set[str]) -> Iterator[FoundBlock]:
    """Yield the outermost blocks that are called. Some modules only contain others' blocks."""
    for block in blocks:
        if block.name in names:
            yield block
        else:
            yield from _called(block.parts, names)


def _proven(
    blocks: Sequence[FoundBlock], trace: BlockTrace, size: int
) -> Iterator[tuple[FoundBlock, Fusion]]:
    """Give the blocks that are sums of their shards, in place of one that is not its parts.

    The weights of the block that was given last are evaluated, those of the next are not.
    """
    for block in blocks:
        proven = _prove(block, trace, size)
        if isinstance(proven, Fusion):
            yield block, proven
        elif block.parts and sum(len(part.projections) for part in block.parts) == len(
            block.projections
        ):
            yield from _proven(block.parts, trace, size)
        else:
            raise UnsupportedModelError(
                f"this model cannot be sharded: {block.name} ({type(block.module).__name__}) "
                f"{proven}; {_ADVICE}"
            )


def _prove(block: FoundBlock, trace: BlockTrace, size: int) -> Fusion | str:
    """Return how the block's shards are cut, or why they do not make it up."""
    if block.name in trace.refusals:
        return trace.refusals[block.name]
    if block.name not in trace.arguments:
        return "is never called by itself"
    return prove(block, trace.arguments[block.name], size)


def _keep(block: FoundBlock, rank: int, size: int, fusion: Fusion) -> None:
    """Leave a rank's arrays in a block, in memory of their own."""
    parts = [
        (layer, {name: a if a is None else mx.contiguous(a) for name, a in arrays.items()})
        for layer, arrays in block_slices(block, rank, size, fusion)
    ]
    mx.eval([arrays for _, arrays in parts])
    put(parts)
    mx.eval(block.module.parameters())
    # MLX would keep the freed buffers for reuse, in sizes that nothing needs any more.
    mx.clear_cache()
