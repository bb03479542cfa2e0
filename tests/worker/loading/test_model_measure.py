import json
from importlib import import_module

import pytest

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import (  # noqa: E402
    ConcatenateKVCache,
    KVCache,
    make_prompt_cache,
)

from mlx_dp.worker.loading import device  # noqa: E402
from mlx_dp.worker.loading.model_measure import measure_shape  # noqa: E402
from mlx_dp.worker.model_probe import main  # noqa: E402
from tests.support.models.tiny_models import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.mlx

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "full_attention_interval": 4,
}
MLA = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rope_scaling": None,
}
MAMBA = {
    "model_type": "mamba",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


def build(config):
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def test_a_dense_model_keeps_keys_and_values_in_every_layer(make_gguf):
    tiny = make_gguf()
    shape = measure_shape(tiny.model, tiny.config)
    assert (shape.num_layers, shape.attention_layers, shape.auxiliary_layers) == (2, 2, 0)
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert shape.auxiliary_bytes_per_slot == 0
    assert (shape.vocab_size, shape.context_length) == (262, 128)
    assert shape.weights_nbytes == sum(array.nbytes for array in tiny.arrays.values())


def test_the_cache_has_the_dtype_of_the_weights(make_gguf):
    tiny = make_gguf()
    tiny.model.set_dtype(mx.float16)
    assert measure_shape(tiny.model, tiny.config).kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_a_hybrid_has_state_beside_its_keys_and_values():
    shape = measure_shape(build(QWEN3_NEXT), QWEN3_NEXT)
    assert (shape.num_layers, shape.attention_layers, shape.auxiliary_layers) == (4, 1, 3)
    assert shape.kv_bytes_per_token == 2 * 2 * 16 * 4
    convolution = 3 * (2 * 2 * 32 + 4 * 32) * 4
    recurrent = 4 * 32 * 32 * 4
    assert shape.auxiliary_bytes_per_slot == 3 * (convolution + recurrent)
    assert shape.hybrid


def test_latent_attention_counts_what_it_really_keeps():
    model = build(MLA)
    shape = measure_shape(model, MLA)
    cache = [KVCache() for _ in model.layers]
    mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    kept = sum(entry.keys[..., :3, :].nbytes + entry.values[..., :3, :].nbytes for entry in cache)
    assert shape.kv_bytes_per_token * 3 == kept
    assert shape.attention_layers == 3


def test_a_pure_state_model_has_no_keys_and_no_context_limit():
    shape = measure_shape(build(MAMBA), MAMBA)
    assert (shape.attention_layers, shape.auxiliary_layers) == (0, 2)
    assert shape.kv_bytes_per_token == 0
    assert shape.auxiliary_bytes_per_slot > 0
    assert shape.context_length == 1 << 20


@pytest.mark.parametrize("length", [0, -1])
def test_a_context_length_below_one_is_no_limit(make_gguf, length):
    tiny = make_gguf()
    config = {**tiny.config, "max_position_embeddings": length}
    assert measure_shape(tiny.model, config).context_length == 1 << 20


def test_measuring_computes_no_weights():
    before = mx.get_active_memory()
    model = build(QWEN3_NEXT | {"vocab_size": 1_000_000})
    assert measure_shape(model, QWEN3_NEXT).weights_nbytes > 200_000_000
    assert mx.get_active_memory() - before < 10_000_000


def test_windows_are_counted_by_their_width():
    tiny = ARCHITECTURES["mimo_v2_flash"]
    shape = measure_shape(tiny.build(), tiny.config)
    # One layer keeps all tokens, and two keep 8 of them, with keys of another width than values.
    assert (shape.attention_layers, shape.auxiliary_layers) == (3, 0)
    assert [window.tokens for window in shape.windows] == [8]
    cache = make_prompt_cache(model := tiny.build())
    mx.eval(model(mx.zeros((1, 20), dtype=mx.int32), cache=cache))
    kept = sum(c.keys[..., :8, :].nbytes + c.values[..., :8, :].nbytes for c in cache[1:])
    assert shape.windows[0].bytes_per_token * 8 == kept
    assert shape.kv_nbytes(20) == 20 * shape.kv_bytes_per_token + kept


def test_a_list_of_state_and_keys_and_values_counts_as_both():
    tiny = ARCHITECTURES["falcon_h1"]
    shape = measure_shape(tiny.build(), tiny.config)
    assert (shape.num_layers, shape.attention_layers, shape.auxiliary_layers) == (2, 2, 2)
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert shape.auxiliary_bytes_per_slot == 2 * (3 * 48 + 4 * 8 * 8) * 4


def test_what_a_cache_of_an_unknown_kind_holds_is_counted_token_by_token(make_gguf):
    tiny = make_gguf()
    expected = measure_shape(tiny.model, tiny.config)
    tiny.model.make_cache = lambda: [ConcatenateKVCache() for _ in range(2)]
    assert measure_shape(tiny.model, tiny.config) == expected


def test_the_device_has_a_kind_and_memory():
    facts = device.facts()
    assert facts["kind"] in ("cpu", "metal", "cuda")
    assert facts["memory_nbytes"] >= facts["working_set_nbytes"] > 1 << 28


def test_a_directory_without_a_model_leaves_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert str(tmp_path) in json.loads(capsys.readouterr().out)["error"]
