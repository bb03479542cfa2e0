"""Mixtures of experts over plain KV caches."""

from collections.abc import Mapping

from tests.support.architectures.fields import EXPERTS, GRANITE_SCALES, ROUTED_EXPERTS
from tests.support.architectures.tiny_model import TinyModel

EXPERT_MODELS: Mapping[str, TinyModel] = {
    "Klear": TinyModel(
        "Klear",
        {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1, "n_shared_experts": 1},
    ),
    "bailing_moe": TinyModel(
        "bailing_moe",
        {**EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1},
    ),
    "dbrx": TinyModel(
        "dbrx",
        {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek": TinyModel("deepseek", ROUTED_EXPERTS),
    "dots1": TinyModel("dots1", ROUTED_EXPERTS),
    "ernie4_5_moe": TinyModel(
        "ernie4_5_moe",
        {
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "glm4_moe": TinyModel(
        "glm4_moe",
        {**ROUTED_EXPERTS, "rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    ),
    "granitemoe": TinyModel(
        "granitemoe", {**GRANITE_SCALES, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "hunyuan": TinyModel(
        "hunyuan",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "moe_topk": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 100.0},
        },
    ),
    "minimax": TinyModel(
        "minimax",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "rotary_dim": 4,
        },
    ),
    "mixtral": TinyModel("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": TinyModel("olmoe", EXPERTS),
    "phimoe": TinyModel(
        "phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": {
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "short_mscale": 1.1,
                "long_mscale": 1.2,
            },
        },
    ),
    "phixtral": TinyModel(
        "phixtral",
        {
            "num_vocab": 260,
            "model_dim": 32,
            "num_heads": 4,
            "rotary_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": TinyModel("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": TinyModel(
        "qwen3_moe", {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    "solar_open": TinyModel("solar_open", {**ROUTED_EXPERTS, "partial_rotary_factor": 1.0}),
}
