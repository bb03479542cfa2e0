"""Config fields that many architectures share."""

from collections.abc import Mapping
from typing import Any

from tests.support.text.tiny_tokenizer import CONTEXT_LENGTH, EOS_TOKEN_ID, VOCAB_SIZE

Fields = Mapping[str, Any]

WINDOW = 8
"""The sliding window: shorter than most prompts of the tests, and than some of their chunks."""

COMMON: Fields = {
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
"""All common names of size fields: from_dict drops those that a ModelArgs lacks."""

EXPERTS: Fields = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

ROUTED_EXPERTS: Fields = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""DeepSeek's names. The first layer is dense."""

LATENT: Fields = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

SLIDING_FULL: Fields = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}

YARN: Fields = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LLAMA_4_SCALING: Fields = {
    **YARN,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
"""Queries behind the 16th position are scaled by their position."""

GPT2_SIZES: Fields = {
    "n_ctx": CONTEXT_LENGTH,
    "n_positions": CONTEXT_LENGTH,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
}

GRANITE_SCALES: Fields = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 0.8,
}


def text_config(**fields: Any) -> Fields:
    """The config of a model with vision, of which only the text model exists."""
    return {"text_config": {**COMMON, **fields}}
