"""Properties of a model that loading finds, and directories that it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.row_content import read_caches
from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.loading.loaded_model import BatchLayout, LoadedModel, inspect, load
from tests.support.models.tiny_models import ARCHITECTURES, DENSE, TINY_MODELS

pytestmark = pytest.mark.mlx


def test_an_architecture_that_mlx_lm_lacks_is_refused_with_its_name(tmp_path):
    directory = DENSE["llama"].write(tmp_path)
    config = DENSE["llama"].config | {"model_type": "no_such_model"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        load(directory)


def test_an_architecture_whose_import_ends_the_process_is_refused(tmp_path, monkeypatch):
    # As mlx-lm's olmo does without a package of its own.
    def leave(*arguments, **named):
        raise SystemExit(1)

    monkeypatch.setattr("mlx_dp.worker.loading.loaded_model.load_model", leave)
    with pytest.raises(UnsupportedModelError, match="cannot be imported"):
        load(DENSE["llama"].write(tmp_path))


def test_code_that_comes_with_a_model_is_run_only_for_those_who_trust_it(tmp_path):
    directory = DENSE["llama"].write(tmp_path)
    config = DENSE["llama"].config | {"model_file": "own.py"}
    (directory / "config.json").write_text(json.dumps(config))
    ran = directory / "ran"
    (directory / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    )
    with pytest.raises(UnsupportedModelError, match="trust_remote_code"):
        load(directory)
    assert not ran.exists()
    assert load(directory, trust_remote_code=True).shape.num_layers > 0
    assert ran.exists()


def test_an_empty_directory_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)


def empty_kv(loaded: LoadedModel) -> list[LayerKV]:
    assert loaded.batch is not None
    return [*loaded.batch.empty.kv, *loaded.batch.empty.recent.windows]


def test_empty_rows_have_the_shapes_of_keys_and_values(tmp_path):
    tiny = TINY_MODELS["deepseek_v3"]
    loaded = load(tiny.write(tmp_path))
    # Latent attention: one head, and keys (latent) wider than values (the rope part).
    assert [(kv.keys.shape, kv.values.shape) for kv in empty_kv(loaded)] == [
        ((1, 1, 0, 16), (1, 1, 0, 8))
    ] * 2


def test_empty_rows_count_caches(tmp_path):
    tiny = DENSE["llama"]
    deeper = replace(tiny, extra={**tiny.extra, "num_hidden_layers": 5})
    assert len(empty_kv(load(deeper.write(tmp_path)))) == 5


def batch_layout(name: str, directory: Path) -> BatchLayout:
    batch = load(ARCHITECTURES[name].write(directory)).batch
    assert batch is not None
    return batch


def test_windows_are_rows_of_their_own(tmp_path):
    batch = batch_layout("gemma3_text", tmp_path)
    assert (len(batch.empty.kv), len(batch.empty.recent.windows)) == (1, 1)
    assert batch.state_sizes == []


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("lfm2", (((1, 2, 32),),)),
        ("qwen3_next", (((1, 3, 64), (1, 4, 8, 8)),)),
        ("falcon_h1", (((1, 3, 48), (1, 4, 8, 8)),) * 2),
        ("mamba", (((1, 3, 64), (1, 64, 8)),) * 2),
    ],
)
def test_states_have_the_shapes_that_they_keep(name, shapes, tmp_path):
    batch = batch_layout(name, tmp_path)
    assert batch.state_shapes == shapes
    assert batch.state_sizes == [len(state) for state in shapes]


def test_a_row_is_taken_once_its_states_have_got_their_lasting_shapes(tmp_path):
    # longcat_flash_ngram remembers the last tokens, of which a short prompt has too few.
    loaded = load(ARCHITECTURES["longcat_flash_ngram"].write(tmp_path))
    assert loaded.batch is not None
    taken = []
    for length in (1, 2, 3):
        caches = make_prompt_cache(loaded.model)
        loaded.model(mx.zeros((1, length), dtype=mx.int32), cache=caches)
        taken.append(loaded.batch.accepts(read_caches(loaded.layout, caches, length)))
    assert taken == [False, True, True]
    assert not loaded.batch.accepts(None)


@pytest.mark.parametrize("name", ["llama4", "deepseek_v41"])
def test_caches_that_only_their_model_understands_are_in_no_batch(name, tmp_path):
    assert load(ARCHITECTURES[name].write(tmp_path)).batch is None


def test_learning_the_shapes_computes_nothing(tmp_path):
    directory = ARCHITECTURES["qwen3_next"].write(tmp_path)
    model, config = load_model(directory, lazy=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert inspect(model, config).batch is not None
    assert mx.get_peak_memory() <= before + 2**16


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
    assert {array.dtype for kv in empty_kv(loaded) for array in kv} == {dtype}
    heads, dim = 2, 8
    assert loaded.shape.kv_bytes_per_token == 2 * 2 * heads * dim * dtype.size


def test_weights_are_counted_as_they_lie_in_memory(tmp_path: Path):
    loaded = load(DENSE["llama"].write(tmp_path))
    stored = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(stored, dict)
    assert loaded.shape.weights_nbytes == sum(array.nbytes for array in stored.values())
