"""Hybrids: some layers hold a recurrent state instead of keys and values."""

from collections.abc import Mapping

from tests.support.architectures.fields import (
    EXPERTS,
    GRANITE_SCALES,
    LATENT,
    ROUTED_EXPERTS,
    WINDOW,
    text_config,
)
from tests.support.architectures.tiny_model import TinyModel

DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
QWEN3_5 = {**DELTA_NET, "full_attention_interval": 2}
SHARED_EXPERTS = {
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LFM2 = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_ff_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}
BAILING = {
    **EXPERTS,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
MAMBA2_MIXER = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
KIMI = {
    **LATENT,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "model_max_length": 2048,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "kda_layers": [1],
        "full_attn_layers": [2],
    },
}

HYBRID_MODELS: Mapping[str, TinyModel] = {
    "bailing_hybrid": TinyModel("bailing_hybrid", {**BAILING, **LATENT}),
    "bailing_moe_linear": TinyModel("bailing_moe_linear", BAILING),
    "bailing_moe_v3": TinyModel(
        "bailing_moe_v3",
        {
            **BAILING,
            **LATENT,
            "model_type": "bailing_hybrid",
            "architectures": ["BailingMoeV3ForCausalLM"],
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "gear": TinyModel(
        "gear",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
        },
    ),
    "granitemoehybrid": TinyModel(
        "granitemoehybrid",
        {
            **GRANITE_SCALES,
            **MAMBA2_MIXER,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "granitemoehybrid_dense": TinyModel(
        "granitemoehybrid",
        {
            **GRANITE_SCALES,
            **MAMBA2_MIXER,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
    ),
    "jamba": TinyModel(
        "jamba",
        {
            **EXPERTS,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
        },
    ),
    "kimi_k3": TinyModel("kimi_k3", text_config(**KIMI, model_type="kimi_linear")),
    "kimi_k3_residual": TinyModel(
        "kimi_k3",
        text_config(
            **KIMI | {"q_lora_rank": 16, "num_hidden_layers": 4},
            model_type="kimi_linear",
            attn_res_block_size=2,
            mla_use_output_gate=True,
            routed_expert_hidden_size=16,
            latent_moe_use_norm=True,
        ),
    ),
    "kimi_linear": TinyModel("kimi_linear", KIMI),
    "lfm2": TinyModel("lfm2", LFM2),
    "lfm2-vl": TinyModel("lfm2-vl", text_config(**LFM2, model_type="lfm2")),
    "lfm2_moe": TinyModel(
        "lfm2_moe", {**LFM2, **EXPERTS, "use_expert_bias": True, "num_dense_layers": 1}
    ),
    "nemotron_h": TinyModel(
        "nemotron_h",
        {
            **ROUTED_EXPERTS,
            "hybrid_override_pattern": ["M", "*", "-", "E", "M"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "olmo_hybrid": TinyModel(
        "olmo_hybrid",
        {
            **DELTA_NET,
            "linear_num_key_heads": 4,
            "linear_allow_neg_eigval": True,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "plamo2": TinyModel(
        "plamo2",
        {
            "hidden_size_per_head": 8,
            "mamba_d_state": 8,
            "mamba_num_heads": 4,
            "mamba_chunk_size": 16,
            "full_attention_idx": [1],
        },
    ),
    "prism_hadamard_qwen35": TinyModel(
        "prism_hadamard_qwen35",
        {
            **text_config(**QWEN3_5 | {"intermediate_size": 512}),
            "schema_version": 1,
            "tensor_namespace": "mlx-lm-text",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [
                {
                    "path": f"model.layers.{layer}.mlp.down_proj",
                    "embedding": False,
                    "dtype": "float16",
                    "block": block,
                }
                for layer, block in enumerate((512, 0))
            ],
        },
    ),
    "qwen3_5": TinyModel("qwen3_5", text_config(**QWEN3_5)),
    "qwen3_5_moe": TinyModel("qwen3_5_moe", text_config(**QWEN3_5, **SHARED_EXPERTS)),
    "qwen3_next": TinyModel(
        "qwen3_next",
        {**DELTA_NET, **SHARED_EXPERTS, "partial_rotary_factor": 0.5, "full_attention_interval": 2},
    ),
    "recurrent_gemma": TinyModel(
        "recurrent_gemma",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
}
