import json
from importlib import import_module

import pytest

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import KVCache  # noqa: E402

from mlx_dp.proto.errors import ConfigError  # noqa: E402
from mlx_dp.worker import device  # noqa: E402
from mlx_dp.worker.model_measure import measure_shape  # noqa: E402
from mlx_dp.worker.probe import main  # noqa: E402

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


def test_measuring_computes_no_weights():
    before = mx.get_active_memory()
    model = build(QWEN3_NEXT | {"vocab_size": 1_000_000})
    assert measure_shape(model, QWEN3_NEXT).weights_nbytes > 200_000_000
    assert mx.get_active_memory() - before < 10_000_000


def test_a_cache_of_an_unknown_kind_is_refused(make_gguf):
    class Odd:
        offset = 0

        def make_mask(self, *arguments, **options):
            return None

        def update_and_fetch(self, keys, values):
            return keys, values

    tiny = make_gguf()
    tiny.model.make_cache = lambda: [Odd(), Odd()]
    with pytest.raises(ConfigError, match="Odd is of an unknown kind"):
        measure_shape(tiny.model, tiny.config)


def test_the_device_has_a_kind_and_memory():
    facts = device.facts()
    assert facts["kind"] in ("cpu", "metal", "cuda")
    assert facts["memory_nbytes"] >= facts["working_set_nbytes"] > 1 << 28


def test_a_directory_without_a_model_leaves_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert str(tmp_path) in json.loads(capsys.readouterr().out)["error"]
