"""Converts a GGUF file's rope scaling to config.json's."""

import math
from typing import Any

import mlx.core as mx

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.gguf.file import GgufFile

FREQUENCIES = "rope_freqs"

# GGUF keeps only the factors that a llama3 scaling gave, not its parameters: these are the
# parameters in use (Llama 3.1 and 3.3, and Llama 3.2), tried one after the other.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def rope_scaling(gguf: GgufFile, *, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of config.json; None: positions are not scaled."""
    kind = gguf.text("llama.rope.scaling.type", "none")
    factors = gguf.arrays.get(f"{FREQUENCIES}.weight")
    if factors is not None:
        return _llama3_scaling(factors, head_dim=head_dim, theta=theta)
    match kind:
        case "none":
            return None
        case "linear":
            factor = gguf.real("llama.rope.scaling.factor")
            return {"rope_type": "linear", "factor": factor}
        case _:
            raise ConfigError(f"cannot convert this GGUF: its rope scaling {kind!r} is not known")


def _llama3_scaling(factors: mx.array, *, head_dim: int, theta: float) -> dict[str, Any]:
    for factor in _LLAMA3_FACTORS:
        expected = mx.array(_llama3_factors(factor, head_dim, theta))
        if factors.shape == expected.shape and mx.allclose(factors, expected, rtol=1e-4).item():
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise ConfigError("cannot convert this GGUF: its rope_freqs are not those of a known Llama 3")


def _llama3_factors(factor: float, head_dim: int, theta: float) -> list[float]:
    """Return each frequency's divisor: 1 for short waves, ``factor`` for long, blended between."""
    factors: list[float] = []
    for pair in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (pair / head_dim)
        if wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH:
            factors.append(1.0)
        elif wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW:
            factors.append(factor)
        else:
            turns = _LLAMA3_CONTEXT / wavelength
            blend = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            factors.append(1 / ((1 - blend) / factor + blend))
    return factors
