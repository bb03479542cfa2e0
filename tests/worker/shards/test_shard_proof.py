"""Conditions for a block to be the sum of its shards, and the reasons for a refusal."""

import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from mlx_dp.worker.contract.engine import UnsupportedModelError  # noqa: E402
from mlx_dp.worker.shards.sharded_load import shard_model  # noqa: E402
from tests.support.models.tiny_models import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.mlx

WIDTH, INNER = 32, 64


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH)

    def __call__(self, x):
        return self.down_proj(nn.relu(self.up_proj(x)))


class Residual(Mlp):
    def __call__(self, x):
        return 0.01 * x + super().__call__(x)


class InnerNorm(Mlp):
    def __call__(self, x):
        return self.down_proj(mx.fast.rms_norm(self.up_proj(x), None, 1e-5))


class InnerScale(Mlp):
    def __init__(self):
        super().__init__()
        self.scale = mx.ones((INNER,))

    def __call__(self, x):
        return self.down_proj(self.scale * self.up_proj(x))


class Mixing(Mlp):
    def __call__(self, x):
        return super().__call__(mx.cumsum(x, axis=-2))


class Named(Mlp):
    def __call__(self, x, scale=1.0):
        return super().__call__(scale * x)


class Around(nn.Module):
    """A block that only forwards does not matter: the MLP within is divided."""

    def __init__(self, call):
        super().__init__()
        self.mlp = Mlp()
        self.call = call

    def __call__(self, x):
        return self.call(self.mlp, x)


class Alone:
    def run(self, block, rows, shard):
        return shard(rows)


def sharded(mlp):
    model = ARCHITECTURES["llama"].build()
    model.layers[1].mlp = mlp
    return model, shard_model(model, rank=0, size=2, runner=Alone())


@pytest.mark.parametrize(
    ("mlp", "failure"),
    [
        (Residual(), "is not the sum of its shards"),
        (InnerNorm(), "is not the sum of its shards"),
        (InnerScale(), "does not work on a part of its inner width"),
        (Mixing(), "mixes its rows"),
        (Around(lambda mlp, x: mlp(x[:, -1:]) + x), "one row for each token"),
        (Around(lambda mlp, x: mlp(x) + mlp(x[0]) + x), "other shapes each time"),
    ],
)
def test_a_block_that_is_no_sum_is_named_and_refused(mlp, failure):
    with pytest.raises(UnsupportedModelError, match=rf"model\.layers\.1\.mlp.*{failure}"):
        sharded(mlp)


def test_arguments_by_name_are_refused():
    named = Around(lambda mlp, x: mlp(x, scale=2.0) + x)
    named.mlp = Named()
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.mlp \(Named\) takes"):
        sharded(named)


def test_the_mlp_within_is_divided_when_what_is_around_it_cannot_be():
    _, model = sharded(Around(lambda mlp, x: x + mlp(x)))
    assert [record.name for record in model.records] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp.mlp",
    ]


def test_a_refused_model_is_as_whole_as_before_in_the_block_that_failed():
    mlp = InnerNorm()
    with pytest.raises(UnsupportedModelError):
        sharded(mlp)
    assert mlp.up_proj.weight.shape == (INNER, WIDTH)
    assert mlp.down_proj.weight.shape == (WIDTH, INNER)


def test_a_module_that_no_pass_calls_stays_whole():
    model = ARCHITECTURES["llama"].build()
    model.extra = Mlp()
    model.lm_head_of_a_draft = [Mlp()]
    records = shard_model(model, rank=0, size=2, runner=Alone()).records
    assert [record.name for record in records] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert model.extra.up_proj.weight.shape == (INNER, WIDTH)
    model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
