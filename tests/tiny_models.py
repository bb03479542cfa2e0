"""Tiny random models of many mlx-lm architectures, in memory or as a model directory.

All are float32 and seeded. No weight is constant (a norm of all ones hides mix-ups), and they are
scaled so that greedy answers wander with their context instead of repeating one token.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from tiny_tokenizer import CONTEXT_LENGTH, EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer

# Every name any architecture gives a size: from_dict drops what a ModelArgs does not know.
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [EOS_TOKEN_ID],
    "pad_token_id": 3,
    "torch_dtype": "float32",
}

EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

LATENT_ATTENTION: Mapping[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

LFM2: Mapping[str, Any] = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_ff_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}

QWEN3_NEXT: Mapping[str, Any] = {
    **EXPERTS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One architecture: the module of ``mlx_lm.models`` and what its config adds to COMMON."""

    architecture: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {**COMMON, **self.extra, "model_type": self.architecture}

    def build(self, seed: int = 1) -> Any:
        """Return the model with its seeded weights, evaluated."""
        module = importlib.import_module(f"mlx_lm.models.{self.architecture}")
        model = module.Model(module.ModelArgs.from_dict(self.config))
        key = mx.random.key(seed)
        names = sorted(name for name, _ in tree_flatten(model.parameters()))
        keys = dict(zip(names, mx.random.split(key, len(names)), strict=True))
        model.update(
            tree_map_with_path(lambda name, old: _weight(keys[name], name, old), model.parameters())
        )
        model.eval()
        mx.eval(model.parameters())
        return model

    def write(self, directory: Path, seed: int = 1) -> Path:
        """Write a directory that ``mlx_lm.load`` and our own start-up take, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        weights = dict(tree_flatten(self.build(seed).parameters()))
        mx.save_safetensors(
            str(directory / "model.safetensors"), weights, metadata={"format": "mlx"}
        )
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        (directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [EOS_TOKEN_ID]})
        )
        write_tokenizer(directory)
        return directory


def _weight(key: mx.array, name: str, old: mx.array) -> mx.array:
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    noise = mx.random.normal(old.shape, key=key)
    if name.endswith(("bias", "A_log")):
        return 0.05 * noise
    if old.ndim < 2:
        return old.astype(mx.float32) + 0.2 * noise
    if "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        # Large embeddings would drown what the layers add, and a tied head then repeats its input.
        return 0.1 * noise
    return noise * (2.0 / old.shape[-1] ** 0.5)


DENSE: Mapping[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama_tied": TinyModel("llama", {"tie_word_embeddings": True}),
    "qwen2": TinyModel("qwen2"),
    "qwen3": TinyModel("qwen3"),
    "gemma": TinyModel("gemma"),
    "gemma2": TinyModel("gemma2"),
    "phi": TinyModel("phi", {"partial_rotary_factor": 0.5}),
    "phi3": TinyModel("phi3"),
    "olmo2": TinyModel("olmo2"),
    "starcoder2": TinyModel("starcoder2"),
    "stablelm": TinyModel("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "cohere": TinyModel("cohere"),
    "granite": TinyModel(
        "granite",
        {
            "logits_scaling": 1.0,
            "attention_multiplier": 0.35,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 0.8,
        },
    ),
    "glm4": TinyModel("glm4", {"partial_rotary_factor": 0.5}),
    "gpt2": TinyModel(
        "gpt2",
        {"n_ctx": 2048, "n_positions": 2048, "n_embd": 32, "n_head": 4, "n_layer": 2},
    ),
    "gpt_neox": TinyModel("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5}),
    "internlm2": TinyModel("internlm2"),
    "smollm3": TinyModel("smollm3", {"no_rope_layer_interval": 2}),
    "nemotron": TinyModel("nemotron", {"hidden_act": "relu2"}),
    "minicpm": TinyModel("minicpm", {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0}),
}
"""One growing KV cache per layer, every layer a plain transformer block."""

EXPERT_MODELS: Mapping[str, TinyModel] = {
    "qwen3_moe": TinyModel(
        "qwen3_moe", {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    "mixtral": TinyModel("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": TinyModel("olmoe", EXPERTS),
    "deepseek_v2": TinyModel(
        "deepseek_v2",
        {
            **LATENT_ATTENTION,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v3": TinyModel("deepseek_v3", LATENT_ATTENTION),
}
"""Experts, and latent attention whose keys and values differ in width."""

TINY_MODELS: Mapping[str, TinyModel] = {**DENSE, **EXPERT_MODELS}
"""All that an engine over plain KV caches must serve, by name."""

SLIDING_MODELS: Mapping[str, TinyModel] = {
    "gemma3_text": TinyModel(
        "gemma3_text",
        {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    ),
    "cohere2": TinyModel("cohere2", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "llama_sliding": TinyModel(
        "llama",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    ),
}
"""Some layers keep a ring of the last 16 tokens."""

HYBRID_MODELS: Mapping[str, TinyModel] = {
    "lfm2": TinyModel("lfm2", LFM2),
    "qwen3_next": TinyModel("qwen3_next", QWEN3_NEXT),
}
"""Some layers hold a recurrent state instead of keys and values."""

DYNAMIC_ROPE = TinyModel("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
"""Its position must be a whole number, so that rows of unequal length cannot share a batch."""
