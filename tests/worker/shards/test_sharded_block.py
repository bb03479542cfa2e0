"""A sharded block: what it exchanges and returns, and which blocks are found."""

import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402

from mlx_dp.worker.shards.block_finder import find_blocks  # noqa: E402
from mlx_dp.worker.shards.block_trace import trace_blocks  # noqa: E402
from mlx_dp.worker.shards.row_arguments import ArgumentShape, RowArguments  # noqa: E402
from mlx_dp.worker.shards.sharded_block import ShardedBlock  # noqa: E402
from mlx_dp.worker.shards.vocabulary_shard import ID_DTYPE, ShardedEmbedding  # noqa: E402
from tests.support.models.tiny_models import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.mlx

ONE = RowArguments(
    leading=2,
    inputs=(ArgumentShape(trailing=(4,), dtype=mx.float32),),
    output=ArgumentShape(trailing=(4,), dtype=mx.float32),
)
ROUTED = RowArguments(
    leading=2,
    inputs=(
        ArgumentShape(trailing=(4,), dtype=mx.bfloat16),
        ArgumentShape(trailing=(2,), dtype=mx.uint32),
        ArgumentShape(trailing=(2,), dtype=mx.float32),
    ),
    output=ArgumentShape(trailing=(2, 4), dtype=mx.float32),
)


class Recording:
    """A runner with a second rank, whose rows are zeros."""

    def __init__(self):
        self.rows = []

    def run(self, block, rows, shard):
        self.rows.append((block, rows))
        others = mx.zeros((3, rows.shape[1]), dtype=rows.dtype)
        return shard(mx.concatenate([others, rows]))[3:]


class Doubling(nn.Module):
    limit = 7

    def __call__(self, x):
        assert x.ndim == 3 and x.shape[0] == 1
        return 2 * x


class Routed(nn.Module):
    def __call__(self, x, indices, weights):
        y = x[..., None, :].astype(mx.float32) + indices[..., None]
        return y * weights[..., None]


def test_rows_go_out_flat_and_come_back_in_the_blocks_shape():
    runner = Recording()
    block = ShardedBlock(5, Doubling(), runner, ONE)
    x = mx.random.normal((2, 3, 4))
    assert mx.array_equal(block(x), 2 * x)
    ((index, rows),) = runner.rows
    assert index == 5
    assert rows.shape == (6, 4) == (6, ONE.width)


def test_several_arguments_travel_in_one_row_exactly():
    runner = Recording()
    block = ShardedBlock(0, Routed(), runner, ROUTED)
    x = mx.random.normal((2, 3, 4)).astype(mx.bfloat16)
    indices = mx.random.randint(0, 2**31 - 1, (2, 3, 2)).astype(mx.uint32)
    weights = mx.random.normal((2, 3, 2))
    assert mx.array_equal(block(x, indices, weights), Routed()(x, indices, weights))
    ((_, rows),) = runner.rows
    assert rows.shape == (6, ROUTED.width) == (6, 8 + 8 + 8)
    assert rows.dtype == ROUTED.dtype == mx.uint8


def test_what_a_model_reads_of_a_block_it_finds_on_the_sharded_one():
    block = ShardedBlock(0, Doubling(), Recording(), ONE)
    assert block.limit == 7
    with pytest.raises(AttributeError):
        _ = block.nothing


def test_layers_are_no_blocks_and_the_outermost_mlp_is():
    found = find_blocks(ARCHITECTURES["deepseek_v3"].build())
    assert [block.name for block in found] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert [p.name for p in found[1].projections] == [
        "model.layers.1.mlp.switch_mlp",
        "model.layers.1.mlp.shared_experts",
    ]


def test_a_block_that_stands_at_two_places_is_found_once_and_replaced_at_both():
    model = ARCHITECTURES["llama"].build()
    model.layers[1].mlp = model.layers[0].mlp
    (block,) = find_blocks(model)
    stranger = nn.Identity()
    block.replace_with(stranger)
    assert model.layers[0].mlp is model.layers[1].mlp is stranger


def test_a_trace_leaves_the_model_as_it_was_and_evaluates_nothing():
    model = ARCHITECTURES["iquestloopcoder"].build()
    blocks = find_blocks(model)
    modules = [layer.mlp for layer in model.layers]
    trace = trace_blocks(model, blocks)
    assert [layer.mlp for layer in model.layers] == modules
    layers = [call.name for call in trace.calls]
    assert layers == ["model.layers.0.mlp", "model.layers.1.mlp"] * 2


class Summed(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def __call__(self, x):
        return self.mlp(x[:, -1:])


def test_a_block_that_is_called_with_other_rows_than_the_tokens_is_noted():
    model = ARCHITECTURES["llama"].build()
    model.layers[0].mlp = Summed(model.layers[0].mlp)
    trace = trace_blocks(model, find_blocks(model))
    assert "model.layers.0.mlp" in trace.refusals
    assert "one row for each token" in trace.refusals["model.layers.0.mlp.mlp"]


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32])
def test_ids_are_exchanged_in_one_dtype_whatever_a_steps_tokens_are(dtype):
    runner = Recording()
    embedding = ShardedEmbedding(0, nn.Embedding(4, 8), (2, 6), runner)
    found = embedding(mx.array([[3, 6, 1]], dtype=dtype))
    assert mx.array_equal(found[0, 0], embedding.inner.weight[1])
    assert not found[0, 1:].any()
    ((_, rows),) = runner.rows
    assert rows.shape == (3, 1) and rows.dtype == ID_DTYPE
