"""Plain transformers: one growing KV cache per layer."""

from collections.abc import Mapping

from tests.support.architectures.fields import GPT2_SIZES, GRANITE_SCALES
from tests.support.architectures.tiny_model import TinyModel

DENSE: Mapping[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama_tied": TinyModel("llama", {"tie_word_embeddings": True}),
    "apertus": TinyModel("apertus", {"post_norm": False, "qk_norm": True}),
    "cohere": TinyModel("cohere", {"logit_scale": 1.0}),
    "ernie4_5": TinyModel("ernie4_5", {"use_bias": False}),
    "exaone": TinyModel("exaone"),
    "exaone4_global": TinyModel(
        "exaone4", {"sliding_window": None, "sliding_window_pattern": None, "rope_scaling": None}
    ),
    "gemma": TinyModel("gemma"),
    "gemma2": TinyModel("gemma2"),
    "glm": TinyModel("glm"),
    "glm4": TinyModel("glm4", {"partial_rotary_factor": 0.5}),
    "gpt2": TinyModel("gpt2", GPT2_SIZES),
    "gpt_bigcode": TinyModel("gpt_bigcode", {**GPT2_SIZES, "n_inner": 64}),
    "gpt_neox": TinyModel("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5}),
    "gptj": TinyModel("gptj", {**GPT2_SIZES, "rotary_dim": 4}),
    "granite": TinyModel("granite", GRANITE_SCALES),
    "helium": TinyModel("helium"),
    "hunyuan_v1_dense": TinyModel("hunyuan_v1_dense"),
    "internlm2": TinyModel("internlm2"),
    "internlm3": TinyModel("internlm3"),
    "lille-130m": TinyModel(
        "lille-130m", {**GPT2_SIZES, "block_size": 2048, "n_embd": 96, "n_kv_heads": 2}
    ),
    "llama4_text": TinyModel(
        "llama4_text",
        {"intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "use_qk_norm": True},
    ),
    "mimo": TinyModel("mimo"),
    "minicpm": TinyModel("minicpm", {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0}),
    "nanochat": TinyModel("nanochat"),
    "nemotron": TinyModel("nemotron", {"hidden_act": "relu2"}),
    "olmo2": TinyModel("olmo2"),
    "openelm": TinyModel(
        "openelm",
        {
            "num_transformer_layers": 2,
            "model_dim": 32,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 1],
            "ffn_multipliers": [1.0, 2.0],
        },
    ),
    "phi": TinyModel("phi", {"partial_rotary_factor": 0.5}),
    "phi3": TinyModel("phi3"),
    "plamo": TinyModel("plamo", {"n_shared_head": 2}),
    "qwen": TinyModel("qwen", {"kv_channels": 8}),
    "qwen2": TinyModel("qwen2"),
    "qwen3": TinyModel("qwen3"),
    "seed_oss": TinyModel("seed_oss"),
    "smollm3": TinyModel("smollm3", {"no_rope_layer_interval": 2}),
    "stablelm": TinyModel("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": TinyModel("starcoder2"),
    "talkie": TinyModel("talkie"),
    "telechat3": TinyModel("telechat3"),
}
