"""The text models of models with vision: another architecture behind a ``text_config``."""

from collections.abc import Mapping

from tests.support.architectures.fields import EXPERTS, LLAMA_4_SCALING, SLIDING_FULL, text_config
from tests.support.architectures.tiny_model import TinyModel

VISION_MODELS: Mapping[str, TinyModel] = {
    "mistral3": TinyModel("mistral3", text_config(model_type="llama")),
    "mistral3_ministral": TinyModel(
        "mistral3",
        text_config(
            model_type="ministral3",
            **SLIDING_FULL,
            rope_parameters=LLAMA_4_SCALING,
        ),
    ),
    "pixtral": TinyModel("pixtral", text_config(model_type="llama")),
    "qwen2_vl": TinyModel("qwen2_vl", text_config(model_type="qwen2")),
    "qwen3_vl": TinyModel("qwen3_vl", text_config(model_type="qwen3")),
    "qwen3_vl_moe": TinyModel(
        "qwen3_vl_moe",
        text_config(**EXPERTS, model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[]),
    ),
}
