"""The projections of an MLP: several that make its inner features, and one that reads them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import mlx.core as mx

from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.shards.linear_slices import (
    Linear,
    Span,
    input_unit,
    input_width,
    is_sliceable,
    num_experts,
    output_width,
    slice_inputs,
    slice_outputs,
)

# w2 and c_proj mean different things in different models: a name says a role only beside others.
_FAMILIES: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("down_proj", frozenset({"gate_proj", "up_proj", "gate_up_proj"})),
    ("c_proj", frozenset({"c_fc", "c_fc_0", "c_fc_1", "w1", "w2"})),
    ("w2", frozenset({"w1", "w3", "v1"})),
    ("fc2", frozenset({"fc1"})),
    ("fc_out", frozenset({"fc_in"})),
    ("dense_4h_to_h", frozenset({"dense_h_to_4h"})),
    ("output_linear", frozenset({"input_linear"})),
    ("linear_out", frozenset({"linear_in"})),
    ("proj_2", frozenset({"proj_1"})),
    ("mlp_resid", frozenset({"mlp_gate", "mlp_linear"})),
    ("wo", frozenset({"wi", "wi_0", "wi_1"})),
)


class Fusion(StrEnum):
    """The layout of gate and value in a projection that makes both."""

    HALVES = "halves"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """One MLP, or all experts of a mixture. ``inner`` is the width that is divided."""

    name: str
    inputs: tuple[Linear, ...]
    output: Linear
    inner: int

    @property
    def fused(self) -> bool:
        return any(output_width(linear) != self.inner for linear in self.inputs)

    @property
    def experts(self) -> int | None:
        return num_experts(self.output)

    @property
    def unit(self) -> int:
        return input_unit(self.output)

    def span(self, rank: int, size: int) -> Span:
        """Return the inner features of a rank. Parts differ by one unit at most."""
        units = self.inner // self.unit
        return rank * units // size * self.unit, (rank + 1) * units // size * self.unit

    def check_size(self, size: int) -> None:
        """Raise UnsupportedModelError when some rank would have nothing."""
        if self.inner // self.unit < size:
            raise UnsupportedModelError(
                f"{self.name} has an inner width of {self.inner}, which in units of {self.unit} "
                f"cannot be divided among {size} ranks"
            )

    def slices(self, rank: int, size: int, fusion: Fusion) -> list[tuple[Linear, dict[str, Any]]]:
        """Return every layer with a rank's slices of its arrays; None: the rank has none."""
        begin, end = self.span(rank, size)
        parts: list[tuple[Linear, dict[str, Any]]] = []
        for linear in self.inputs:
            spans = [(begin, end)]
            if output_width(linear) != self.inner and fusion is Fusion.HALVES:
                spans = [(begin, end), (self.inner + begin, self.inner + end)]
            elif output_width(linear) != self.inner:
                spans = [(2 * begin, 2 * end)]
            parts.append((linear, dict(slice_outputs(linear, spans))))
        reading: dict[str, Any] = dict(slice_inputs(self.output, (begin, end)))
        # A bias on every rank would be added once per rank in the sum.
        if "bias" in self.output:
            reading["bias"] = self.output.bias if rank == 0 else None
        return [*parts, (self.output, reading)]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(linear) for linear in (*self.inputs, self.output))

    def kept_nbytes(self, rank: int, size: int) -> int:
        """Return a rank's parts, without reading any weights."""
        kept = 0
        for linear, arrays in self.slices(rank, size, Fusion.HALVES):
            kept += _nbytes(linear) - sum(int(linear[name].nbytes) for name in arrays)
            kept += sum(int(array.nbytes) for array in arrays.values() if array is not None)
        return kept


def _nbytes(linear: Linear) -> int:
    return sum(int(a.nbytes) for a in linear.values() if isinstance(a, mx.array))


def find_projections(name: str, module: Any) -> Projections | None:
    """Return the projections among a module's children; None: there are none.

    Raises UnsupportedModelError for a child that has such a name but cannot be sliced.
    """
    children: Mapping[str, Any] = module.children()
    for output, names in _FAMILIES:
        inputs = [child for child in children if child in names and child != output]
        if output not in children or not inputs:
            continue
        layers = {child: children[child] for child in (*inputs, output)}
        for child, layer in layers.items():
            if not is_sliceable(layer):
                raise UnsupportedModelError(
                    f"{name}.{child} is a {type(layer).__name__}, which cannot be sliced"
                )
        return _fitted(name, [layers[child] for child in inputs], layers[output])
    return None


def _fitted(name: str, inputs: list[Linear], output: Linear) -> Projections | None:
    """Check that the widths agree with the names."""
    inner = input_width(output)
    if len({input_width(linear) for linear in inputs}) != 1:
        return None
    if any(output_width(linear) not in (inner, 2 * inner) for linear in inputs):
        return None
    return Projections(name=name, inputs=tuple(inputs), output=output, inner=inner)


@contextmanager
def sliced(parts: list[tuple[Linear, dict[str, Any]]]) -> Iterator[None]:
    """Give layers these arrays temporarily, so that a graph built meanwhile uses them."""
    whole = [(linear, {name: linear[name] for name in arrays}) for linear, arrays in parts]
    put(parts)
    try:
        yield
    finally:
        put(whole)


def put(parts: list[tuple[Linear, dict[str, Any]]]) -> None:
    """Replace arrays of layers. None removes an array."""
    for linear, arrays in parts:
        for name, array in arrays.items():
            if array is None:
                del linear[name]
            else:
                linear[name] = array
