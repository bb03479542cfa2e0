"""Nested caches: one layer holds a list of caches."""

from collections.abc import Mapping

from tests.support.architectures.fields import LATENT, ROUTED_EXPERTS, WINDOW, text_config
from tests.support.architectures.tiny_model import TinyModel

INDEXER = {
    **LATENT,
    **ROUTED_EXPERTS,
    "q_lora_rank": 16,
    # Enough heads that the scores of two tokens are hardly ever both 0: the choice between
    # equal scores is arbitrary.
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 2048,
}
SPARSE = {"index_topk": 12}
LONGCAT = {
    **LATENT,
    "q_lora_rank": 16,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
MINIMAX_M3 = {
    "num_hidden_layers": 3,
    "dense_intermediate_size": 64,
    "intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "sparse_attention", "sparse_attention"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
}

NESTED_MODELS: Mapping[str, TinyModel] = {
    "baichuan_m1": TinyModel(
        "baichuan_m1",
        {"conv_window": 2, "sliding_window": WINDOW, "sliding_window_layers": [0]},
    ),
    "deepseek_v32": TinyModel("deepseek_v32", INDEXER),
    "deepseek_v32_sparse": TinyModel("deepseek_v32", {**INDEXER, **SPARSE}),
    "falcon_h1": TinyModel(
        "falcon_h1",
        {
            "mamba_d_conv": 4,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_d_state": 8,
            "mamba_n_heads": 4,
            "mamba_chunk_size": 16,
        },
    ),
    "glm_moe_dsa": TinyModel(
        "glm_moe_dsa", {**INDEXER, "rope_parameters": {"rope_theta": 10000.0}}
    ),
    "glm_moe_dsa_sparse": TinyModel(
        "glm_moe_dsa", {**INDEXER, **SPARSE, "rope_parameters": {"rope_theta": 10000.0}}
    ),
    "longcat_flash": TinyModel("longcat_flash", LONGCAT),
    "longcat_flash_ngram": TinyModel(
        "longcat_flash_ngram",
        {**LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    ),
    "minimax_m3_vl": TinyModel("minimax_m3_vl", text_config(**MINIMAX_M3)),
}
