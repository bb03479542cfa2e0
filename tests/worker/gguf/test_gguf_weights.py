import struct

import pytest

from mlx_dp.proto.errors import ConfigError

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402
from mlx_lm.models.rope_utils import Llama3RoPE  # noqa: E402

from mlx_dp.worker.gguf.file import GgufFile  # noqa: E402
from mlx_dp.worker.gguf.weights import (  # noqa: E402
    check_convertible,
    config_of,
    convert_weights,
)

pytestmark = pytest.mark.mlx


def convert(tiny, storage="float32"):
    gguf = GgufFile(tiny.arrays, tiny.metadata)
    check_convertible(gguf)
    weights = convert_weights(gguf, storage, lambda done, total: None)
    return weights, config_of(gguf, weights)


def logits_of(model):
    return model(mx.array([[5, 9, 200, 17, 5, 64]]))


def pack(tiny, name, bits):
    weight, scales, biases = mx.quantize(tiny.arrays[f"{name}.weight"], group_size=32, bits=bits)
    parts = {"weight": weight, "scales": scales, "biases": biases}
    for part, array in parts.items():
        stored = array if part == "weight" else array.astype(mx.float16)
        tiny.arrays[f"{name}.{part}"] = stored


@pytest.mark.parametrize("tied", [True, False])
def test_converted_weights_compute_what_the_original_model_does(make_gguf, tied):
    tiny = make_gguf(tie_word_embeddings=tied)
    weights, config = convert(tiny)
    model = Model(ModelArgs.from_dict(config))
    model.load_weights(list(weights.items()), strict=True)
    assert config["tie_word_embeddings"] is tied
    assert mx.array_equal(logits_of(model), logits_of(tiny.model)).item()


def test_the_config_has_the_files_sizes(make_gguf):
    tiny = make_gguf()
    _, config = convert(tiny)
    assert {key: config[key] for key in tiny.config} == tiny.config
    assert config["head_dim"] == 16
    assert config["torch_dtype"] == "float32"
    assert "quantization" not in config
    assert "rope_scaling" not in config


def test_packed_tensors_become_float32_exactly(make_gguf):
    tiny = make_gguf()
    pack(tiny, "blk.0.ffn_up", 4)
    pack(tiny, "token_embd", 8)
    weights, _ = convert(tiny)
    scales = tiny.arrays["blk.0.ffn_up.scales"].astype(mx.float32)
    biases = tiny.arrays["blk.0.ffn_up.biases"].astype(mx.float32)
    expected = mx.dequantize(
        tiny.arrays["blk.0.ffn_up.weight"], scales, biases, group_size=32, bits=4
    )
    assert {array.dtype for array in weights.values()} == {mx.float32}
    assert mx.array_equal(weights["model.layers.0.mlp.up_proj.weight"], expected).item()


def test_packed_rows_of_q_move_with_their_scales(make_gguf):
    tiny = make_gguf()
    pack(tiny, "blk.1.attn_q", 4)
    whole, _ = convert(tiny)
    packed, config = convert(tiny, "4bit")
    name = "model.layers.1.self_attn.q_proj"
    parts = [packed[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    scales, biases = (part.astype(mx.float32) for part in parts[1:])
    unpacked = mx.dequantize(parts[0], scales, biases, group_size=32, bits=4)
    assert mx.array_equal(unpacked, whole[f"{name}.weight"]).item()
    assert config["quantization"] == {"group_size": 32, "bits": 4}


def test_4bit_keeps_the_files_packing_and_names_each_other_width(make_gguf):
    tiny = make_gguf()
    for layer in (0, 1):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"):
            pack(tiny, f"blk.{layer}.{name}", 4)
    pack(tiny, "token_embd", 8)
    weights, config = convert(tiny, "4bit")
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    packed = weights["model.layers.0.mlp.up_proj.weight"]
    assert mx.array_equal(packed, tiny.arrays["blk.0.ffn_up.weight"]).item()
    # 96 columns are packed; 64-column ffn_down stays as the file has it.
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == mx.float16
    assert weights["model.norm.weight"].dtype == mx.float16


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_recognised(make_gguf, factor):
    tiny = make_gguf()
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tiny.metadata["llama.rope.freq_base"] = mx.array(500_000.0)
    rope = Llama3RoPE(
        dims=16, max_position_embeddings=128, base=500_000.0, scaling_config=dict(scaling)
    )
    plain = 500_000.0 ** (mx.arange(0, 16, 2) / 16)
    tiny.arrays["rope_freqs.weight"] = rope._freqs / plain
    _, config = convert(tiny)
    assert config["rope_scaling"] == scaling


def test_linear_scaling_comes_along(make_gguf):
    tiny = make_gguf()
    tiny.metadata |= {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": mx.array(2.0),
    }
    assert convert(tiny)[1]["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "qwen3moe", "architecture 'qwen3moe'"),
        ("llama.expert_count", mx.array(8), "llama.expert_count"),
        ("llama.rope.dimension_count", mx.array(8), "head size of 16"),
        ("llama.rope.scaling.type", "yarn", "rope scaling 'yarn'"),
        ("llama.block_count", "two", "not a whole number"),
        ("llama.block_count", mx.array(3), r"no tensor for model\.layers\.2"),
        ("tokenizer.ggml.tokens", ["a"], "1 tokens but embeddings for"),
    ],
)
def test_metadata_that_mlx_lm_cannot_follow_is_refused(make_gguf, key, value, words):
    tiny = make_gguf()
    tiny.metadata[key] = value
    with pytest.raises(ConfigError, match=words):
        convert(tiny)


def test_a_missing_key_is_told_with_the_file(tmp_path):
    path = tmp_path / "bare.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ConfigError, match=r"bare\.gguf has no key general\.architecture"):
        GgufFile.read(path).text("general.architecture")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.0.attn_q.bias", "rope.weight", "blk.x.attn_q.weight"]
)
def test_a_tensor_without_a_place_is_refused(make_gguf, name):
    tiny = make_gguf()
    tiny.arrays[name] = mx.zeros((64,))
    with pytest.raises(ConfigError, match=f"tensor {name}"):
        convert(tiny)


def test_unknown_frequencies_are_refused(make_gguf):
    tiny = make_gguf()
    tiny.arrays["rope_freqs.weight"] = mx.full((8,), 3.0)
    with pytest.raises(ConfigError, match="rope_freqs"):
        convert(tiny)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03\x00\x00\x00broken"])
def test_a_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"GGUF"):
        GgufFile.read(path)
