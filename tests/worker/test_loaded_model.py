"""What loading finds out about a model, and which models it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from tiny_models import DENSE, HYBRID_MODELS, SLIDING_MODELS, TINY_MODELS

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.engine import UnsupportedModelError
from mlx_dp.worker.loaded_model import load

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_sliding_windows_are_refused_by_the_name_of_their_cache(name, tmp_path):
    with pytest.raises(UnsupportedModelError, match="RotatingKVCache"):
        load(SLIDING_MODELS[name].write(tmp_path))


@pytest.mark.parametrize("name", HYBRID_MODELS)
def test_recurrent_layers_are_refused_by_name(name, tmp_path):
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        load(HYBRID_MODELS[name].write(tmp_path))


def test_an_architecture_that_mlx_lm_lacks_is_refused_with_its_name(tmp_path):
    directory = DENSE["llama"].write(tmp_path)
    config = DENSE["llama"].config | {"model_type": "no_such_model"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        load(directory)


def test_an_empty_directory_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)


def test_empty_rows_have_the_shapes_of_keys_and_values(tmp_path):
    tiny = TINY_MODELS["deepseek_v3"]
    loaded = load(tiny.write(tmp_path))
    # Latent attention: one head, and keys (latent) wider than values (the rope part).
    assert [(kv.keys.shape, kv.values.shape) for kv in loaded.empty] == [
        ((1, 1, 0, 16), (1, 1, 0, 8))
    ] * 2


def test_empty_rows_count_caches(tmp_path):
    tiny = DENSE["llama"]
    deeper = replace(tiny, extra={**tiny.extra, "num_hidden_layers": 5})
    assert len(load(deeper.write(tmp_path)).empty) == 5


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_kv_of_a_quantised_model_has_the_dtype_of_its_scales(dtype, tmp_path):
    tiny = DENSE["llama"]
    directory = tiny.write(tmp_path)
    model = tiny.build()
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    settings = {"quantization": {"group_size": 32, "bits": 4}}
    (directory / "config.json").write_text(json.dumps(tiny.config | settings))
    loaded = load(directory)
    assert {array.dtype for kv in loaded.empty for array in kv} == {dtype}
    heads, dim = 2, 8
    assert loaded.shape.kv_bytes_per_token == 2 * 2 * heads * dim * dtype.size


def test_weights_are_counted_as_they_lie_in_memory(tmp_path: Path):
    loaded = load(DENSE["llama"].write(tmp_path))
    stored = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(stored, dict)
    assert loaded.shape.weights_nbytes == sum(array.nbytes for array in stored.values())
