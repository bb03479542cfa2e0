"""Latent attention (MLA): one head, whose keys and values may differ in width."""

from collections.abc import Mapping

from tests.support.architectures.fields import (
    LATENT,
    LLAMA_4_SCALING,
    ROUTED_EXPERTS,
    YARN,
    text_config,
)
from tests.support.architectures.tiny_model import TinyModel

LATENT_EXPERTS = {**LATENT, **ROUTED_EXPERTS}

LATENT_MODELS: Mapping[str, TinyModel] = {
    "deepseek_v2": TinyModel("deepseek_v2", {**LATENT_EXPERTS, "rope_scaling": YARN}),
    "deepseek_v3": TinyModel("deepseek_v3", LATENT_EXPERTS),
    "deepseek_v3_query_rank": TinyModel(
        "deepseek_v3", {**LATENT_EXPERTS, "q_lora_rank": 16, "rope_scaling": YARN}
    ),
    "glm4_moe_lite": TinyModel("glm4_moe_lite", LATENT_EXPERTS),
    "kimi_k25": TinyModel("kimi_k25", text_config(**LATENT_EXPERTS)),
    "kimi_vl": TinyModel("kimi_vl", text_config(**LATENT_EXPERTS)),
    "minicpm3": TinyModel(
        "minicpm3",
        {
            **LATENT,
            "q_lora_rank": 16,
            "rope_scaling": {
                "original_max_position_embeddings": 512,
                "short_factor": [1.0] * 4,
                "long_factor": [1.5] * 4,
            },
            "dim_model_base": 32,
            "scale_depth": 1.4,
            "scale_emb": 1.0,
        },
    ),
    "mistral4": TinyModel("mistral4", {**LATENT_EXPERTS, "rope_parameters": LLAMA_4_SCALING}),
    "youtu_llm": TinyModel("youtu_llm", LATENT),
}
