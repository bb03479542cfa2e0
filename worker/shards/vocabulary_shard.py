"""Reduces a model's embedding and LM head to one rank's share of the tokens."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_dp.worker.shards.linear_slices import Span
from mlx_dp.worker.shards.projections import put
from mlx_dp.worker.shards.sharded_block import BlockRecord, BlockRunner
from mlx_dp.worker.shards.vocabulary import Vocabulary, VocabularyLayer

ID_DTYPE: Final = mx.int32
"""The type of the ids that ranks exchange, for any type of a step's tokens."""


class VocabularyHead:
    """Returns all logits of rows; this rank computes those of its own tokens."""

    def __init__(
        self,
        index: int,
        compute: Callable[[mx.array], mx.array],
        span: Span,
        size: int,
        runner: BlockRunner,
    ) -> None:
        self._index = index
        self._compute = compute
        self._span = span
        self._size = size
        self._runner = runner

    def __call__(self, hidden: mx.array) -> mx.array:
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = self._runner.run(self._index, rows, self.shard)
        return logits.reshape(*hidden.shape[:-1], self._size)

    def shard(self, rows: mx.array) -> mx.array:
        """Return the logits of own tokens among zeros."""
        begin, end = self._span
        return mx.pad(self._compute(rows), [(0, 0), (begin, self._size - end)])


class ShardedHead(Module):
    """Replaces a model's LM head. ``inner`` makes the logits of own tokens."""

    def __init__(self, inner: Any, head: VocabularyHead) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.head = head

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.head(hidden)


class ShardedEmbedding(Module):
    """Replaces a model's embedding. ``inner`` has the rows of own tokens.

    ``head``: for a model whose embedding also makes the logits.
    """

    def __init__(self, index: int, inner: Any, span: Span, runner: BlockRunner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.index = index
        self.span = span
        self.runner = runner
        self.head: VocabularyHead | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name in self:
            return super().__getattr__(name)
        return getattr(self["inner"], name)

    def __call__(self, ids: mx.array) -> mx.array:
        rows = ids.astype(ID_DTYPE).reshape(-1, 1)
        return self.runner.run(self.index, rows, self.shard).reshape(*ids.shape, -1)

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Return logits, as a tied embedding does."""
        assert self.head is not None, "no pass was seen to do this"
        return self.head(hidden)

    def shard(self, rows: mx.array) -> mx.array:
        """Return the embeddings of own tokens, and zeros for those that another rank has."""
        begin, end = self.span
        ids = rows[:, 0]
        own = mx.logical_and(ids >= begin, ids < end)
        found: mx.array = self.inner(mx.where(own, ids - begin, 0))
        return mx.where(own[:, None], found, mx.zeros_like(found))


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
