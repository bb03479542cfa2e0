"""The models of the engine's benchmark: the one that --model names, and a random hybrid."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs
from mlx.utils import tree_flatten

from mlx_dp.orchestrator.model.model_source import host_device, resolve_model
from mlx_dp.orchestrator.model.progress import terminal_progress

HYBRID: Mapping[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "mamba", "attention"] * 2,
    "max_position_embeddings": 32768,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 12,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""A small Granite 4.0 H, 60 MB in float32: two Mamba 2 layers to each layer of attention."""


def named_model(model: str | None) -> Path:
    """The directory that ``--model`` names, or the demo model's."""
    with terminal_progress() as progress:
        resolved = resolve_model(
            model,
            revision=None,
            cache_dir=Path(platformdirs.user_cache_dir("mlx-dp")),
            progress=progress,
            device=host_device(),
        )
    return resolved.path


def write_hybrid(directory: Path, config: Mapping[str, Any] = HYBRID, seed: int = 1) -> Path:
    """Write a hybrid of random float32 weights, the same for the same seed."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    names = sorted(parameters)
    keys = dict(zip(names, mx.random.split(mx.random.key(seed), len(names)), strict=True))
    weights = {name: _weight(keys[name], name, old) for name, old in parameters.items()}
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(directory / "model.safetensors"),
        weights,
        metadata={"format": "mlx"},
    )
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1))
    return directory


def _weight(key: mx.array, name: str, old: mx.array) -> Any:
    """Scaled so that greedy text varies with its context instead of repeating one token."""
    noise: mx.array = mx.random.normal(old.shape, key=key)
    if old.ndim < 2:
        # The states keep the spread of their decay rates, or they would remember nothing.
        return old + 0.05 * noise
    if "embed" in name:
        return 0.1 * noise
    return noise * (2.0 / old.shape[-1] ** 0.5)
