"""Rounds products of several rows as other devices do; a CPU rounds each row by itself.

On Apple's GPUs single rows and several rows take different kernels: sums are added up in another
order, and from M5 on float32 factors are rounded to TF32 in the latter.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

_EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class MatmulNoise:
    """``tf32``: factors of float32 keep 10 bits of their mantissa.

    ``ulps``: the largest error of a product, in units in the last place.
    """

    tf32: bool = False
    ulps: float = 0.0

    def factor(self, array: mx.array) -> mx.array:
        return rounded_to_tf32(array) if self.tf32 and array.dtype == mx.float32 else array

    def product(self, array: mx.array) -> mx.array:
        """Noise that depends on the content of all rows, as where a kernel sorts rows by expert."""
        if not self.ulps or array.dtype not in _EPSILON:
            return array
        wide = array.astype(mx.float32)
        phase = mx.mean(mx.abs(wide)) * 1e5 + wide.size
        waves = mx.sin(mx.arange(wide.size) * 12.9898 + phase).reshape(wide.shape)
        return (wide * (1 + self.ulps * _EPSILON[array.dtype] * waves)).astype(array.dtype)


TF32 = MatmulNoise(tf32=True)
ONE_ULP = MatmulNoise(ulps=1.0)
TWO_ULPS = MatmulNoise(ulps=2.0)


def rounded_to_tf32(array: mx.array) -> mx.array:
    return ((array.view(mx.uint32) + 0x1000) & 0xFFFFE000).view(mx.float32)


@contextmanager
def matmul_noise(noise: MatmulNoise) -> Iterator[None]:
    """Until the end of the block, products of several rows have this noise."""
    with pytest.MonkeyPatch.context() as patch:
        install(noise, patch.setattr)
        yield


def install(noise: MatmulNoise, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the noise into all MLX functions by which models multiply."""
    replace(mx, "gather_mm", _in_float32(mx.gather_mm))
    for owner, name in (
        (mx.array, "__matmul__"),
        (mx, "matmul"),
        (mx, "quantized_matmul"),
        (mx, "gather_mm"),
        (mx, "gather_qmm"),
    ):
        replace(owner, name, _noisy(getattr(owner, name), noise, rows_at=0))
    replace(mx, "addmm", _noisy(mx.addmm, noise, rows_at=1))


def _noisy(multiply: Any, noise: MatmulNoise, *, rows_at: int) -> Any:
    def noisy(*arguments: Any, **named: Any) -> mx.array:
        rows, weights = arguments[rows_at : rows_at + 2]
        if _num_rows(rows, weights) == 1:
            single: mx.array = multiply(*arguments, **named)
            return single
        factors = (noise.factor(rows), noise.factor(weights))
        product = multiply(*arguments[:rows_at], *factors, *arguments[rows_at + 2 :], **named)
        return noise.product(product)

    return noisy


def _in_float32(gather: Any) -> Any:
    """On a CPU, MLX gathers in float32 only."""

    def widened(rows: mx.array, weights: mx.array, **named: Any) -> mx.array:
        wide = gather(rows.astype(mx.float32), weights.astype(mx.float32), **named)
        product: mx.array = wide.astype(rows.dtype)
        return product

    return widened


def _num_rows(rows: mx.array, weights: mx.array) -> int:
    """The rows multiplied by one matrix; [rows, ..., 1, width] is the experts' form."""
    if weights.ndim > 2:
        return rows.shape[0] if rows.ndim > 2 else rows.size // rows.shape[-1]
    return math.prod(rows.shape[:-1])
