"""Whether a block is the sum of its shards, tried with random rows."""

from typing import Any, Final

import mlx.core as mx

from mlx_dp.worker.block_finder import FoundBlock
from mlx_dp.worker.projections import Fusion, sliced
from mlx_dp.worker.row_arguments import ArgumentShape, RowArguments

_ROWS: Final = 8
_SEED: Final = 5
_TOLERANCES: Final = ((mx.float32, 1e-3), (mx.float16, 0.02), (mx.bfloat16, 0.06))
"""Of the largest number. What is no sum is off by about all of it."""


class ShardProof:
    """Random rows for one block, and what the whole block makes of them."""

    def __init__(self, block: FoundBlock, arguments: RowArguments, size: int) -> None:
        self._block = block
        self._size = size
        self._shapes = arguments
        self._rows = _random_rows(arguments, block)
        self._whole = self._run()
        mx.eval(self._whole)

    def failure(self, fusion: Fusion) -> str | None:
        """Say why the shards do not make up the block; None: they do."""
        scale = float(mx.abs(self._whole).max())
        if not 0.0 < scale < float("inf"):
            return "gives nothing but zeros or no numbers for random rows, which proves nothing"
        summed = mx.zeros_like(self._whole)
        try:
            for rank in range(self._size):
                with sliced(block_slices(self._block, rank, self._size, fusion)):
                    shard = self._run()
                mx.eval(shard)
                summed = summed + shard
        except ValueError:
            # Some other array of the block has the inner width as well.
            return "does not work on a part of its inner width"
        if not self._near(summed, scale).all():
            return "is no sum of its shards"
        # In other shapes a router may round a tie elsewhere, so a few rows may differ.
        if self._near(self._run_apart(), scale).sum() <= _ROWS // 2:
            return "mixes its rows"
        return None

    def _near(self, other: mx.array, scale: float) -> mx.array:
        error = mx.abs(other - self._whole).max(axis=-1)
        return error <= _tolerance(self._shapes.output.dtype) * scale

    def _run(self) -> mx.array:
        return self._flat(self._block.module(*self._shapes.unpack(self._rows)), self._rows)

    def _run_apart(self) -> mx.array:
        rows = [self._rows[index : index + 1] for index in range(_ROWS)]
        outputs = [self._flat(self._block.module(*self._shapes.unpack(r)), r) for r in rows]
        return mx.concatenate(outputs)

    @staticmethod
    def _flat(output: mx.array, rows: mx.array) -> mx.array:
        return output.reshape(rows.shape[0], -1).astype(mx.float32)


def block_slices(
    block: FoundBlock, rank: int, size: int, fusion: Fusion
) -> list[tuple[Any, dict[str, Any]]]:
    """Return every divided layer of a block with the arrays that a rank has of it."""
    return [part for p in block.projections for part in p.slices(rank, size, fusion)]


def _random_rows(shapes: RowArguments, block: FoundBlock) -> mx.array:
    keys = mx.random.split(mx.random.key(_SEED), len(shapes.inputs))
    experts = min((p.experts for p in block.projections if p.experts), default=1)
    arrays = [_random(shape, key, experts) for shape, key in zip(shapes.inputs, keys, strict=True)]
    return shapes.pack(arrays)


def _random(shape: ArgumentShape, key: mx.array, experts: int) -> mx.array:
    full = (_ROWS, *shape.trailing)
    if mx.issubdtype(shape.dtype, mx.floating):
        return mx.random.normal(full, key=key).astype(shape.dtype)
    return mx.random.randint(0, experts, full, key=key).astype(shape.dtype)


def _tolerance(dtype: mx.Dtype) -> float:
    return next((bound for known, bound in _TOLERANCES if known == dtype), 1e-3)
