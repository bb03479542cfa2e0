"""Slices of linear layers, by output features or by input features."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.linear import Linear as DenseLinear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# MLX has no types for its modules.
Linear = Any
Span = tuple[int, int]

_QUANTIZED: Final = (QuantizedLinear, QuantizedSwitchLinear)
_KNOWN: Final = (DenseLinear, SwitchLinear, *_QUANTIZED)
_WORD_BITS: Final = 32
"""Quantized numbers are packed into words of this many bits."""


def is_sliceable(module: Any) -> bool:
    """Whether this is a linear layer with known arrays. A subclass may have others."""
    return type(module) in _KNOWN


def num_experts(linear: Linear) -> int | None:
    """Return the number of experts in a layer; None: it has no experts."""
    return linear.weight.shape[0] if linear.weight.ndim > 2 else None


def output_width(linear: Linear) -> int:
    """Return the number of output features of a layer."""
    width: int = linear.weight.shape[-2]
    return width


def input_width(linear: Linear) -> int:
    """Return the number of input features of a layer."""
    width: int = linear.weight.shape[-1]
    if isinstance(linear, _QUANTIZED):
        return width * _WORD_BITS // int(linear.bits)
    return width


def input_unit(linear: Linear) -> int:
    """Return the number of input features that cannot be divided: one quantization group."""
    return int(linear.group_size) if isinstance(linear, _QUANTIZED) else 1


def slice_outputs(linear: Linear, spans: Sequence[Span]) -> dict[str, mx.array]:
    """Return the arrays of a layer with only these output features."""
    sliced: dict[str, mx.array] = {}
    for name in ("weight", "scales", "biases"):
        array = linear.get(name)
        if array is not None:
            sliced[name] = _join([array[..., begin:end, :] for begin, end in spans], axis=-2)
    if "bias" in linear:
        sliced["bias"] = _join([linear.bias[..., begin:end] for begin, end in spans], axis=-1)
    return sliced


def slice_inputs(linear: Linear, span: Span) -> dict[str, mx.array]:
    """Return the arrays of a layer with only these input features, without its bias.

    Both ends lie at multiples of ``input_unit``.
    """
    unit = input_unit(linear)
    begin, end = span
    assert begin % unit == 0 and end % unit == 0, f"{span} cuts a group of {unit}"
    if not isinstance(linear, _QUANTIZED):
        return {"weight": linear.weight[..., begin:end]}
    bits = int(linear.bits)
    words = slice(begin * bits // _WORD_BITS, end * bits // _WORD_BITS)
    groups = slice(begin // unit, end // unit)
    sliced = {"weight": linear.weight[..., words], "scales": linear.scales[..., groups]}
    biases: mx.array | None = linear.get("biases")
    if biases is not None:
        sliced["biases"] = biases[..., groups]
    return sliced


def _join(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
