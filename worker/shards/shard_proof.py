"""Checks with random rows that a block is the sum of its shards."""

from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any, Final

import mlx.core as mx

from mlx_dp.worker.loading.rounding import FLOAT32_TOLERANCE
from mlx_dp.worker.shards.block_finder import FoundBlock
from mlx_dp.worker.shards.projections import Fusion, sliced
from mlx_dp.worker.shards.row_arguments import ArgumentShape, RowArguments

_ROWS: Final = 8
_SEED: Final = 5


def prove(block: FoundBlock, arguments: RowArguments, size: int) -> Fusion | str:
    """Return the layout in which a block is the sum of its shards, or why there is none.

    The block's weights are evaluated. The check computes in float32 for any weights: on CPU, MLX
    sums quantized products in the dtype of the rows, and a sum in bfloat16 proves nothing.
    """
    with sliced(_in_float32(block)):
        mx.eval(block.module.parameters())
        trial = _Trial(block, arguments, size)
        failure = trial.failure(Fusion.HALVES)
        if failure is None:
            return Fusion.HALVES
        fused = any(projections.fused for projections in block.projections)
        if fused and trial.failure(Fusion.INTERLEAVED) is None:
            return Fusion.INTERLEAVED
        return failure


def block_slices(
    block: FoundBlock, rank: int, size: int, fusion: Fusion
) -> list[tuple[Any, dict[str, Any]]]:
    """Return every divided layer of a block with the arrays that a rank has of it."""
    return [part for p in block.projections for part in p.slices(rank, size, fusion)]


class _Trial:
    """Random rows for one block, and the whole block's output for them."""

    def __init__(self, block: FoundBlock, arguments: RowArguments, size: int) -> None:
        self._block = block
        self._size = size
        self._shapes = replace(arguments, inputs=tuple(map(_widened, arguments.inputs)))
        self._rows = _random_rows(self._shapes, block)
        self._whole = self._run(self._rows)
        self._scale = float(mx.abs(self._whole).max())

    def failure(self, fusion: Fusion) -> str | None:
        """Return why the block is not the sum of its shards; None: it is."""
        if not 0.0 < self._scale < float("inf"):
            return "gives only zeros, or no numbers, for random rows, which proves nothing"
        summed = mx.zeros_like(self._whole)
        try:
            for rank in range(self._size):
                with sliced(block_slices(self._block, rank, self._size, fusion)):
                    summed = summed + self._run(self._rows)
        except ValueError:
            # Another array of the block has the inner width as well.
            return "does not work on a part of its inner width"
        if not self._near(summed).all():
            return "is not the sum of its shards"
        apart = mx.concatenate([self._run(self._rows[row : row + 1]) for row in range(_ROWS)])
        # In other shapes a router may round a tie elsewhere, so a few rows may differ.
        if self._near(apart).sum() <= _ROWS // 2:
            return "mixes its rows"
        return None

    def _near(self, other: mx.array) -> mx.array:
        """Return which rows are equal up to rounding. Any other block differs by far more."""
        apart = mx.abs(other - self._whole).max(axis=-1) / self._scale
        if (apart <= FLOAT32_TOLERANCE.least).all():
            return mx.ones(apart.shape, dtype=mx.bool_)
        return apart <= self._tolerance

    @cached_property
    def _tolerance(self) -> float:
        """The measured difference between one row and several equal rows on this device.

        Products of float32 may be rounded to TF32 in one shape and not in another.
        """
        noise = []
        for row in range(_ROWS):
            alone = self._rows[row : row + 1]
            apart = mx.abs(self._run(mx.repeat(alone, _ROWS, axis=0)) - self._run(alone))
            noise.append(float(apart.max()) / self._scale)
        # A router may round a tie elsewhere in a few of them.
        return FLOAT32_TOLERANCE.with_noise(median(noise))

    def _run(self, rows: mx.array) -> mx.array:
        output: mx.array = self._block.module(*self._shapes.unpack(rows))
        flat = output.reshape(rows.shape[0], -1).astype(mx.float32)
        # Evaluated at once: each pending graph would hold a copy of the weights.
        mx.eval(flat)
        return flat


def _in_float32(block: FoundBlock) -> list[tuple[Any, dict[str, Any]]]:
    """Return the divided layers with their floating arrays in float32."""
    layers = [layer for p in block.projections for layer in (*p.inputs, p.output)]
    return [
        (layer, {n: a.astype(mx.float32) for n, a in layer.items() if _is_float(a)})
        for layer in layers
    ]


def _is_float(array: Any) -> bool:
    return isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating)


def _widened(shape: ArgumentShape) -> ArgumentShape:
    return replace(shape, dtype=mx.float32) if mx.issubdtype(shape.dtype, mx.floating) else shape


def _random_rows(shapes: RowArguments, block: FoundBlock) -> mx.array:
    keys = mx.random.split(mx.random.key(_SEED), len(shapes.inputs))
    experts = min((p.experts for p in block.projections if p.experts), default=1)
    arrays = [_random(shape, key, experts) for shape, key in zip(shapes.inputs, keys, strict=True)]
    return shapes.pack(arrays)


def _random(shape: ArgumentShape, key: mx.array, experts: int) -> mx.array:
    full = (_ROWS, *shape.trailing)
    if mx.issubdtype(shape.dtype, mx.floating):
        return mx.random.normal(full, key=key)
    return mx.random.randint(0, experts, full, key=key).astype(shape.dtype)
