"""What may differ between two ways to compute the same logits."""

import math
from collections.abc import Sequence
from typing import Final

import mlx.core as mx

FLOAT32_TOLERANCE: Final = 1e-3
HALF_TOLERANCE: Final = 6e-2
"""Largest difference of logits, relative to the largest logit, that rounding may cause."""


def difference(expected: Sequence[mx.array], found: Sequence[mx.array]) -> float:
    """Largest difference relative to the largest logit; infinite when it is not a number."""
    whole = mx.stack(list(expected[: len(found)])).astype(mx.float32)
    other = mx.stack(list(found)).astype(mx.float32)
    relative = mx.max(mx.abs(whole - other)) / mx.maximum(mx.max(mx.abs(whole)), 1e-6)
    value: float = relative.item()  # type: ignore[assignment]
    return value if math.isfinite(value) else math.inf


def tolerance(logits: Sequence[mx.array]) -> float:
    """What rounding may make of these."""
    return FLOAT32_TOLERANCE if logits[0].dtype == mx.float32 else HALF_TOLERANCE
