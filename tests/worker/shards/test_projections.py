"""Parts of projections: the features of each rank, which together are the whole."""

from itertools import pairwise

import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from mlx_lm.models.switch_layers import SwitchLinear  # noqa: E402

from mlx_dp.worker.contract.engine import UnsupportedModelError  # noqa: E402
from mlx_dp.worker.shards.projections import Fusion, find_projections, sliced  # noqa: E402

pytestmark = pytest.mark.mlx

WIDTH = 32


class Gated(nn.Module):
    def __init__(self, inner, make, fused):
        super().__init__()
        if fused:
            self.gate_up_proj = make(WIDTH, 2 * inner)
        else:
            self.gate_proj = make(WIDTH, inner)
            self.up_proj = make(WIDTH, inner)
        self.down_proj = make(inner, WIDTH)


def dense(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=True)


def experts(inputs, outputs):
    return SwitchLinear(inputs, outputs, 3, bias=True)


def build(inner, make=dense, fused=False, **quantization):
    module = Gated(inner, make, fused)
    if quantization:
        nn.quantize(module, **quantization)
    return find_projections("layer.mlp", module)


def whole_weight(layer, arrays):
    """Return a layer's weights as numbers, of these arrays."""
    if "scales" not in arrays:
        return arrays["weight"]
    return mx.dequantize(
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )


def own(layer):
    return {
        name: layer[name] for name in ("weight", "scales", "biases") if layer.get(name) is not None
    }


@given(units=st.integers(1, 40), unit=st.sampled_from([1, 32, 64]), size=st.integers(1, 8))
def test_ranks_divide_the_inner_width_at_groups_and_differ_by_one(units, unit, size):
    quantized = {} if unit == 1 else {"group_size": unit, "bits": 4}
    layers = (nn.Linear(WIDTH, units * unit), nn.Linear(units * unit, WIDTH))
    down = layers[1].to_quantized(**quantized) if quantized else layers[1]
    module = nn.Module()
    module.fc1, module.fc2 = layers[0], down
    projections = find_projections("mlp", module)
    if units < size:
        with pytest.raises(UnsupportedModelError, match=f"units of {unit} cannot be divided"):
            projections.check_size(size)
        return
    projections.check_size(size)
    spans = [projections.span(rank, size) for rank in range(size)]
    assert spans[0][0] == 0 and spans[-1][1] == units * unit
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert all(begin % unit == 0 for begin, _ in spans)
    lengths = [end - begin for begin, end in spans]
    assert min(lengths) >= unit and max(lengths) - min(lengths) <= unit


@pytest.mark.parametrize("make", [dense, experts])
@pytest.mark.parametrize(
    "quantization",
    [
        {},
        {"group_size": 32, "bits": 4},
        {"group_size": 32, "bits": 3},
        {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    ],
)
def test_the_parts_of_three_ranks_are_the_whole(make, quantization):
    projections = build(192, make, **quantization)
    ranks = [projections.slices(rank, 3, Fusion.HALVES) for rank in range(3)]
    for index, layer in enumerate((*projections.inputs, projections.output)):
        arrays = [rank[index][1] for rank in ranks]
        assert all(rank[index][0] is layer for rank in ranks)
        axis = -1 if layer is projections.output else -2
        joined = mx.concatenate([whole_weight(layer, part) for part in arrays], axis=axis)
        assert mx.array_equal(joined, whole_weight(layer, own(layer)))
    down = [rank[-1][1] for rank in ranks]
    assert down[0]["bias"] is projections.output.bias
    assert down[1]["bias"] is down[2]["bias"] is None
    ups = [rank[0][1]["bias"] for rank in ranks]
    assert mx.array_equal(mx.concatenate(ups, axis=-1), projections.inputs[0].bias)
    assert sum(projections.kept_nbytes(rank, 3) for rank in range(3)) == projections.nbytes


def test_a_fused_projection_is_cut_in_both_its_halves_or_between_its_pairs():
    projections = build(64, fused=True)
    weight = projections.inputs[0].weight
    halves = projections.slices(1, 2, Fusion.HALVES)[0][1]["weight"]
    assert mx.array_equal(halves, mx.concatenate([weight[32:64], weight[96:128]]))
    pairs = projections.slices(1, 2, Fusion.INTERLEAVED)[0][1]["weight"]
    assert mx.array_equal(pairs, weight[64:128])


def test_a_part_takes_a_layers_place_for_a_while():
    projections = build(64)
    down = projections.output
    weight, bias = down.weight, down.bias
    with sliced(projections.slices(1, 2, Fusion.HALVES)):
        assert down.weight.shape == (WIDTH, 32)
        assert "bias" not in down
    assert down.weight is weight and down.bias is bias


def test_names_without_fitting_widths_are_no_projections():
    module = Gated(64, dense, fused=False)
    module.down_proj = dense(48, WIDTH)
    assert find_projections("mlp", module) is None
    module = Gated(64, dense, fused=False)
    module.up_proj = dense(WIDTH + 1, 64)
    assert find_projections("mlp", module) is None


def test_w2_makes_features_beside_c_proj_and_reads_them_beside_w1():
    module = nn.Module()
    module.w1, module.w2, module.c_proj = dense(WIDTH, 64), dense(WIDTH, 64), dense(64, WIDTH)
    assert find_projections("mlp", module).output is module.c_proj
    del module["c_proj"]
    module.w2 = dense(64, WIDTH)
    assert find_projections("mlp", module).output is module.w2


def test_a_layer_of_an_unknown_kind_is_refused_by_name():
    class Rotated(nn.Linear):
        pass

    module = Gated(64, dense, fused=False)
    module.down_proj = Rotated(64, WIDTH)
    with pytest.raises(UnsupportedModelError, match=r"layer\.mlp\.down_proj is a Rotated"):
        find_projections("layer.mlp", module)
