"""Caches that do not match layers one to one, and features of a single architecture."""

from collections.abc import Mapping

from tests.support.architectures.fields import WINDOW, text_config
from tests.support.architectures.tiny_model import TinyModel

IRREGULAR_MODELS: Mapping[str, TinyModel] = {
    "afm7": TinyModel(
        "afm7",
        {
            "hidden_dim": 32,
            "num_kv_reuse_layers": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
            "hidden_dim_scale_factor": 2.0,
        },
    ),
    "deepseek_v41": TinyModel(
        "deepseek_v41",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "compress_ratios": [0, 4, 8, 0],
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 512,
            "hc_mult": 2,
        },
    ),
    "llama4": TinyModel(
        "llama4",
        text_config(
            model_type="llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=16,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=64,
            num_experts_per_tok=1,
            num_local_experts=4,
            rope_scaling=None,
            use_qk_norm=True,
        ),
    ),
    "llama_dynamic_rope": TinyModel("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "nanbeige": TinyModel("nanbeige", {"num_loops": 2}),
    "nemotron-nas": TinyModel(
        "nemotron-nas",
        {
            "num_hidden_layers": 3,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
            ],
        },
    ),
    "phi3small": TinyModel(
        "phi3small",
        {
            # It masks tokens from 100256 on, whatever the vocabulary's size.
            "vocab_size": 100352,
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 64,
            "gegelu_limit": 20.0,
            "mup_embedding_multiplier": 1.0,
            "mup_width_multiplier": 1.0,
            "blocksparse_block_size": 32,
            "blocksparse_num_local_blocks": 2,
            "blocksparse_vert_stride": 2,
        },
    ),
}
