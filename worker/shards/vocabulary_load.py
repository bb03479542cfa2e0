"""Reduces a model's embedding and LM head to one rank's share of the weights."""

from typing import Any

import mlx.core as mx

from mlx_dp.worker.shards.projections import put
from mlx_dp.worker.shards.sharded_block import BlockRecord, BlockRunner
from mlx_dp.worker.shards.vocabulary import Vocabulary, VocabularyLayer
from mlx_dp.worker.shards.vocabulary_shard import (
    ID_DTYPE,
    ShardedEmbedding,
    ShardedHead,
    VocabularyHead,
)


def shard_vocabulary(
    vocabulary: Vocabulary, rank: int, size: int, runner: BlockRunner, index: int
) -> tuple[tuple[ShardedEmbedding, VocabularyHead], tuple[BlockRecord, BlockRecord]]:
    """Put the shards in place as blocks ``index`` and the next, and return their weights."""
    lookup, making = vocabulary.embedding, vocabulary.head
    records = (
        _record("embedding", lookup, rank, size),
        _record("head", making, rank, size, tied=vocabulary.tied),
    )
    # Before the layers are cut: their sizes are read from their arrays.
    looked_up, made = lookup.span(rank, size), making.span(rank, size)
    for layer in vocabulary.layers:
        _keep(layer, rank, size)
    embedding = ShardedEmbedding(index, lookup.module, looked_up, runner)
    head = VocabularyHead(
        index + 1,
        making.module.as_linear if vocabulary.tied else making.module,
        made,
        making.output_width,
        runner,
    )
    lookup.put(embedding)
    if vocabulary.tied:
        embedding.head = head
    else:
        making.put(ShardedHead(making.module, head))
    return (embedding, head), records


def _record(
    name: str, layer: VocabularyLayer, rank: int, size: int, *, tied: bool | None = None
) -> BlockRecord:
    """``tied``: None for an embedding; a tied head's bytes are the embedding's."""
    return BlockRecord(
        name=name,
        width=layer.width,
        dtype=ID_DTYPE if tied is None else layer.dtype,
        output_width=layer.output_width,
        output_dtype=layer.output_dtype,
        nbytes=0 if tied else layer.nbytes,
        kept_nbytes=0 if tied else layer.kept_nbytes(rank, size),
        answers=tied is not None,
    )


def _keep(layer: VocabularyLayer, rank: int, size: int) -> None:
    kept: dict[str, Any] = {
        name: mx.contiguous(array) for name, array in layer.slices(rank, size).items()
    }
    mx.eval(list(kept.values()))
    put([(layer.module, kept)])
    mx.clear_cache()
