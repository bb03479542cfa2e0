"""Architectures that mlx-lm cannot run, or whose output depends on its chunk size, with reasons."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.architectures.fields import SLIDING_FULL, text_config
from tests.support.architectures.tiny_model import TinyModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """``message`` is part of the error of the module's import or of ``generate_step``.

    With ``metal``, it works on a machine that has Metal.
    """

    tiny: TinyModel
    reason: str
    message: str
    metal: bool = False


BROKEN_IN_MLX_LM: Mapping[str, Broken] = {
    "bitnet": Broken(
        tiny=TinyModel("bitnet"),
        reason="its linear layers are a Metal kernel",
        message="No Metal back-end",
        metal=True,
    ),
    "muse_spark": Broken(
        tiny=TinyModel(
            "muse_spark",
            text_config(
                **SLIDING_FULL,
                post_norm_eps=1e-6,
                rope_parameters={"rope_theta": 10000.0},
                layer_rope_theta=[10000.0, 0],
                final_logit_softcapping=20.0,
                output_multiplier=1.0,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_hidden_size=32,
                moe_intermediate_size=32,
            ),
        ),
        reason="its norms are Metal kernels",
        message="No Metal back-end",
        metal=True,
    ),
    "olmo": Broken(
        tiny=TinyModel(
            "olmo",
            {
                "d_model": 32,
                "n_layers": 2,
                "mlp_hidden_size": 64,
                "n_heads": 4,
                "embedding_size": 260,
            },
        ),
        reason="its import ends the process without the package ai2-olmo; with it, prefill adds "
        "the text 'causal' to the scores",
        message="1",
    ),
}

CHUNK_DEPENDENT: Mapping[str, str] = {
    "phi3small": "adds its boolean mask to the scores, so that a prompt sees its own future "
    "within a chunk",
    "plamo3": "a token sees one more than the window within a chunk, but not across chunks",
}
"""Its output changes with the chunks of the prompt, even alone."""
