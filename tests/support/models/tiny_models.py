"""Tiny random models of every mlx-lm architecture: one table, by the names that tests use."""

from collections.abc import Mapping

from tests.support.architectures.dense import DENSE
from tests.support.architectures.experts import EXPERT_MODELS
from tests.support.architectures.hybrid import HYBRID_MODELS
from tests.support.architectures.irregular import IRREGULAR_MODELS
from tests.support.architectures.latent import LATENT_MODELS
from tests.support.architectures.nested import NESTED_MODELS
from tests.support.architectures.recurrent import RECURRENT_MODELS
from tests.support.architectures.sliding import SLIDING_MODELS
from tests.support.architectures.tiny_model import TinyModel
from tests.support.architectures.vision import VISION_MODELS

__all__ = [
    "ARCHITECTURES",
    "DENSE",
    "DYNAMIC_ROPE",
    "HYBRID_MODELS",
    "SLIDING_MODELS",
    "TINY_MODELS",
    "TinyModel",
]

ARCHITECTURES: Mapping[str, TinyModel] = {
    **DENSE,
    **EXPERT_MODELS,
    **LATENT_MODELS,
    **SLIDING_MODELS,
    **HYBRID_MODELS,
    **RECURRENT_MODELS,
    **NESTED_MODELS,
    **VISION_MODELS,
    **IRREGULAR_MODELS,
}
"""All architectures that mlx-lm can run. Some occur several times, where their caches differ."""

DYNAMIC_ROPE = IRREGULAR_MODELS["llama_dynamic_rope"]
"""Its position must be a whole number, so rows of unequal length cannot share a batch."""

_SAMPLE = (
    "llama",
    "llama_tied",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "starcoder2",
    "stablelm",
    "cohere",
    "granite",
    "gpt2",
    "gpt_neox",
    "smollm3",
    "minicpm",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
)

TINY_MODELS: Mapping[str, TinyModel] = {name: ARCHITECTURES[name] for name in _SAMPLE}
"""A sample of those with plain KV caches only."""
