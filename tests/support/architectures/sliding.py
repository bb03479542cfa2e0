"""Sliding windows: some layers keep a ring of the last tokens, the others all."""

from collections.abc import Mapping

from tests.support.architectures.fields import (
    EXPERTS,
    LLAMA_4_SCALING,
    ROUTED_EXPERTS,
    SLIDING_FULL,
    WINDOW,
    YARN,
    text_config,
)
from tests.support.architectures.tiny_model import TinyModel

PATTERN = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
GEMMA3 = {**PATTERN, "query_pre_attn_scalar": 8}
GEMMA4 = {
    **PATTERN,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 260,
    "tie_word_embeddings": True,
}
ROPE_BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
}

SLIDING_MODELS: Mapping[str, TinyModel] = {
    "afmoe": TinyModel(
        "afmoe", {**EXPERTS, **SLIDING_FULL, "num_shared_experts": 1, "num_dense_layers": 1}
    ),
    "cohere2": TinyModel("cohere2", {**PATTERN, "logit_scale": 1.0}),
    "exaone4": TinyModel(
        "exaone4", {**PATTERN, "sliding_window_pattern": "LG", "rope_scaling": None}
    ),
    "exaone_moe": TinyModel(
        "exaone_moe",
        {**EXPERTS, **SLIDING_FULL, "num_shared_experts": 1, "is_moe_layer": [False, True]},
    ),
    "gemma3": TinyModel("gemma3", text_config(**GEMMA3, model_type="gemma3_text")),
    "gemma3_text": TinyModel("gemma3_text", GEMMA3),
    "gemma3n": TinyModel(
        "gemma3n",
        text_config(
            model_type="gemma3n_text",
            num_hidden_layers=4,
            layer_types=GEMMA4["layer_types"],
            sliding_window=WINDOW,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=260,
            rope_local_base_freq=10000.0,
            final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            hidden_size_per_layer_input=8,
            altup_num_inputs=4,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        ),
    ),
    "gemma4": TinyModel("gemma4", text_config(**GEMMA4, model_type="gemma4_text")),
    "gemma4_text": TinyModel("gemma4_text", GEMMA4),
    "gemma4_text_experts": TinyModel(
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt_oss": TinyModel(
        "gpt_oss",
        {
            **SLIDING_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": {**YARN, "rope_type": "yarn"},
        },
    ),
    "iquestloopcoder": TinyModel("iquestloopcoder", {"loop_num": 2, "loop_window_size": WINDOW}),
    "laguna": TinyModel(
        "laguna",
        {
            **EXPERTS,
            **SLIDING_FULL,
            "shared_expert_intermediate_size": 32,
            "num_attention_heads_per_layer": [8, 4],
            "rope_parameters": ROPE_BY_TYPE,
        },
    ),
    "llama_sliding": TinyModel("llama", SLIDING_FULL),
    "mellum": TinyModel("mellum", {**EXPERTS, **SLIDING_FULL, "rope_parameters": ROPE_BY_TYPE}),
    "mimo_v2_flash": TinyModel(
        "mimo_v2_flash",
        {
            **ROUTED_EXPERTS,
            "hybrid_layer_pattern": [0, 1, 1],
            "num_hidden_layers": 3,
            "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "head_dim": 12,
            "v_head_dim": 8,
            "swa_head_dim": 12,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.34,
            "attention_value_scale": 0.7,
        },
    ),
    "ministral3": TinyModel("ministral3", {**SLIDING_FULL, "rope_parameters": LLAMA_4_SCALING}),
    "muse_glimmer": TinyModel("muse_glimmer", {**SLIDING_FULL, "output_multiplier": 1.0}),
    "olmo3": TinyModel("olmo3", SLIDING_FULL),
    "plamo3": TinyModel("plamo3", {"window_size": WINDOW, "sliding_window_pattern": 2}),
    "spark2_5": TinyModel("spark2_5", {**SLIDING_FULL, "rope_parameters": ROPE_BY_TYPE}),
    "step3p5": TinyModel(
        "step3p5",
        {
            **SLIDING_FULL,
            "num_attention_groups": 2,
            "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
            "partial_rotary_factors": [1.0, 0.5],
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "moe_layers_enum": "1",
        },
    ),
}
