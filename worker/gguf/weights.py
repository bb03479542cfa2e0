"""Llama-family GGUF tensors as mlx-lm weights, with the config.json that describes them."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.gguf.file import GgufFile

Storage = Literal["float32", "4bit"]

# GGUF packs Q4_0, Q4_1 and Q8_0 in blocks of 32 values.
GROUP_SIZE = 32

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_KNOWN_KEYS = {
    "vocab_size",
    "tensor_data_layout",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
}
_FREQUENCIES = "rope_freqs"
# GGUF keeps only the factors that a llama3 scaling gave, not its parameters: these are the
# parameters in use (Llama 3.1 and 3.3, and Llama 3.2), tried one after the other.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a llama model, from GGUF metadata."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, gguf: GgufFile) -> "LlamaShape":
        heads = gguf.integer("llama.attention.head_count")
        hidden = gguf.integer("llama.embedding_length")
        head_dim = gguf.integer("llama.attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := gguf.integer(f"llama.{key}", head_dim)) != head_dim:
                raise ConfigError(
                    f"this GGUF has llama.{key} {other} with a head size of {head_dim}: "
                    "mlx-lm's llama needs them equal"
                )
        return cls(
            hidden_size=hidden,
            layers=gguf.integer("llama.block_count"),
            heads=heads,
            kv_heads=gguf.integer("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=len(gguf.strings("tokenizer.ggml.tokens")),
        )


def check_convertible(gguf: GgufFile) -> None:
    """Raise ConfigError for a file that mlx-lm's llama would run incorrectly."""
    architecture = gguf.text("general.architecture")
    if architecture != "llama":
        raise ConfigError(
            f"cannot convert a GGUF of architecture {architecture!r}: only 'llama' is supported; "
            "use the model's mlx-lm version from the hub instead"
        )
    for key in gguf:
        name = key.removeprefix("llama.")
        if name != key and name not in _KNOWN_KEYS:
            raise ConfigError(f"cannot convert this GGUF: its key {key} is not supported")


def config_of(gguf: GgufFile, weights: dict[str, mx.array]) -> dict[str, Any]:
    """Return the config.json for ``weights`` that ``convert_weights`` made of the same file."""
    shape = LlamaShape.of(gguf)
    context = gguf.integer("llama.context_length")
    theta = gguf.real("llama.rope.freq_base", 10_000.0)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "intermediate_size": gguf.integer("llama.feed_forward_length"),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        # The file holds a float32, which reads back as 9.9999997e-06.
        "rms_norm_eps": float(f"{gguf.real('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_traditional": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": str(weights["model.norm.weight"].dtype).removeprefix("mlx.core."),
    }
    scaling = _rope_scaling(gguf, head_dim=shape.head_dim, theta=theta)
    if scaling is not None:
        config["rope_scaling"] = scaling
    quantization = _quantization_of(weights)
    if quantization is not None:
        config["quantization"] = quantization
        config["quantization_config"] = quantization
    return config


def convert_weights(
    gguf: GgufFile, storage: Storage, report: Callable[[int, int], None]
) -> dict[str, mx.array]:
    """Rename, un-permute and store every tensor; ``report`` gets (tensors done, tensors in all)."""
    shape = LlamaShape.of(gguf)
    weights: dict[str, mx.array] = {}
    modules = [name for name in _modules(gguf) if name != _FREQUENCIES]
    for done, source in enumerate(modules):
        report(done, len(modules))
        target = _target_name(source)
        parts = _parts(gguf, source)
        if target.endswith("q_proj"):
            parts = {name: _unpermute(part, shape.heads) for name, part in parts.items()}
        elif target.endswith("k_proj"):
            parts = {name: _unpermute(part, shape.kv_heads) for name, part in parts.items()}
        for name, part in _stored(parts, storage).items():
            weights[f"{target}.{name}"] = part
        mx.eval([weights[f"{target}.{name}"] for name in parts if f"{target}.{name}" in weights])
    report(len(modules), len(modules))
    _check_complete(weights, shape)
    return weights


def _modules(gguf: GgufFile) -> Iterator[str]:
    for name in sorted(gguf.arrays):
        if name.endswith((".scales", ".biases")):
            continue
        if not name.endswith(".weight"):
            raise ConfigError(
                f"cannot convert this GGUF: its tensor {name} has no place in a llama"
            )
        yield name.removesuffix(".weight")


def _target_name(source: str) -> str:
    if source == "output":
        return "lm_head"
    if source in _OUTER_NAMES:
        return _OUTER_NAMES[source]
    layer = _LAYER.fullmatch(source)
    if layer is None or layer[2] not in _LAYER_NAMES:
        raise ConfigError(
            f"cannot convert this GGUF: its tensor {source}.weight has no place in a dense llama"
        )
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}"


def _parts(gguf: GgufFile, source: str) -> dict[str, mx.array]:
    names = {part: f"{source}.{part}" for part in ("weight", "scales", "biases")}
    return {part: gguf.arrays[name] for part, name in names.items() if name in gguf.arrays}


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Reorder the rows of q and k: GGUF interleaves the two halves that rope rotates together."""
    half = rows.shape[0] // heads // 2
    inner = rows.shape[1:]
    return rows.reshape(heads, half, 2, *inner).swapaxes(1, 2).reshape(rows.shape)


def _stored(parts: dict[str, mx.array], storage: Storage) -> dict[str, mx.array]:
    """Return the parts in the target's types.

    In 4 bits, packed weights stay as they are, and all other arrays become float16, the type of the
    scales: bfloat16 would round the scales, and float32 would make all activations float32. In
    float32 everything is unpacked.
    """
    if storage == "4bit":
        return {
            name: part if part.dtype == mx.uint32 else part.astype(mx.float16)
            for name, part in parts.items()
        }
    weight = parts["weight"]
    if "scales" not in parts:
        return {"weight": weight.astype(mx.float32)}
    scales = parts["scales"].astype(mx.float32)
    biases = parts["biases"].astype(mx.float32)
    bits = _bits(weight, scales)
    return {"weight": mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)}


def _bits(weight: mx.array, scales: mx.array) -> int:
    return int(32 * weight.shape[-1] // (GROUP_SIZE * scales.shape[-1]))


def _quantization_of(weights: dict[str, mx.array]) -> dict[str, Any] | None:
    """The config's ``quantization``: the commonest width, and each module that differs from it."""
    bits = {
        name.removesuffix(".scales"): _bits(weights[f"{name.removesuffix('.scales')}.weight"], part)
        for name, part in weights.items()
        if name.endswith(".scales")
    }
    if not bits:
        return None
    widths = list(bits.values())
    usual = max(set(widths), key=widths.count)
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual}
    for module, width in bits.items():
        if width != usual:
            quantization[module] = {"group_size": GROUP_SIZE, "bits": width}
    return quantization


def _check_complete(weights: dict[str, mx.array], shape: LlamaShape) -> None:
    wanted = {f"{name}.weight" for name in _OUTER_NAMES.values()} | {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(shape.layers)
        for name in _LAYER_NAMES.values()
    }
    missing = sorted(wanted - weights.keys())
    if missing:
        raise ConfigError(f"this GGUF is incomplete: it has no tensor for {missing[0]}")
    rows = weights["model.embed_tokens.weight"].shape[0]
    if rows != shape.vocab_size:
        raise ConfigError(f"this GGUF has {shape.vocab_size} tokens but embeddings for {rows}")


def _rope_scaling(gguf: GgufFile, *, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of config.json; None: positions are not scaled."""
    kind = gguf.text("llama.rope.scaling.type", "none")
    factors = gguf.arrays.get(f"{_FREQUENCIES}.weight")
    if factors is not None:
        return _llama3_scaling(factors, head_dim=head_dim, theta=theta)
    match kind:
        case "none":
            return None
        case "linear":
            factor = gguf.real("llama.rope.scaling.factor")
            return {"rope_type": "linear", "factor": factor}
        case _:
            raise ConfigError(f"cannot convert this GGUF: its rope scaling {kind!r} is not known")


def _llama3_scaling(factors: mx.array, *, head_dim: int, theta: float) -> dict[str, Any]:
    for factor in _LLAMA3_FACTORS:
        expected = mx.array(_llama3_factors(factor, head_dim, theta))
        if factors.shape == expected.shape and mx.allclose(factors, expected, rtol=1e-4).item():
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise ConfigError("cannot convert this GGUF: its rope_freqs are not those of a known Llama 3")


def _llama3_factors(factor: float, head_dim: int, theta: float) -> list[float]:
    """Return each frequency's divisor: 1 for short waves, ``factor`` for long, blended between."""
    factors: list[float] = []
    for pair in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (pair / head_dim)
        if wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH:
            factors.append(1.0)
        elif wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW:
            factors.append(factor)
        else:
            turns = _LLAMA3_CONTEXT / wavelength
            blend = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            factors.append(1 / ((1 - blend) / factor + blend))
    return factors
