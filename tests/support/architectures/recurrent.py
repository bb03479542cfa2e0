"""Recurrent models: every layer holds a recurrent state, none has keys and values."""

from collections.abc import Mapping

from tests.support.architectures.tiny_model import TinyModel

MAMBA = {
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}

RECURRENT_MODELS: Mapping[str, TinyModel] = {
    "mamba": TinyModel("mamba", MAMBA),
    "falcon_mamba": TinyModel("mamba", {**MAMBA, "model_type": "falcon_mamba"}),
    "mamba2": TinyModel(
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.001, 100.0],
            "time_step_rank": 4,
        },
    ),
    "rwkv7": TinyModel(
        "rwkv7",
        {
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
    ),
}
