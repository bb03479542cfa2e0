"""One tiny random model of an mlx-lm architecture, in memory or as a model directory.

All are float32 and seeded. No weight is constant (a norm of all ones hides mix-ups), and they are
scaled so that greedy text varies with its context instead of repeating one token.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from tests.support.architectures.fields import COMMON
from tests.support.text.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One architecture: the module of ``mlx_lm.models`` and what its config adds to COMMON."""

    architecture: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {**COMMON, "model_type": self.architecture, **self.extra}

    def build(self, seed: int = 1) -> Any:
        """Return the model with its seeded weights, evaluated."""
        module = importlib.import_module(f"mlx_lm.models.{self.architecture}")
        # A copy: some of the classes write into the dicts they are given.
        config = json.loads(json.dumps(self.config))
        model = module.Model(module.ModelArgs.from_dict(config))
        key = mx.random.key(seed)
        names = sorted(name for name, _ in tree_flatten(model.parameters()))
        keys = dict(zip(names, mx.random.split(key, len(names)), strict=True))
        model.update(
            tree_map_with_path(lambda name, old: _weight(keys[name], name, old), model.parameters())
        )
        model.eval()
        mx.eval(model.parameters())
        return model

    def write(self, directory: Path, seed: int = 1) -> Path:
        """Write a directory that ``mlx_lm.load`` and our own start-up accept, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        weights = dict(tree_flatten(self.build(seed).parameters()))
        mx.save_safetensors(
            str(directory / "model.safetensors"), weights, metadata={"format": "mlx"}
        )
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        (directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [EOS_TOKEN_ID]})
        )
        write_tokenizer(directory)
        return directory


def _weight(key: mx.array, name: str, old: mx.array) -> mx.array:
    if name.endswith(".weight") and old.dtype == mx.uint32:
        return mx.random.randint(0, 2**32 - 1, old.shape, dtype=mx.uint32, key=key)
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    noise = mx.random.normal(old.shape, key=key)
    if name.endswith(".signs"):
        return mx.sign(noise)
    if name.endswith(("bias", "A_log")):
        return 0.05 * noise
    if old.ndim < 2:
        return old.astype(mx.float32) + 0.2 * noise
    if "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        # Large embeddings would dominate the layers' output, and a tied head then repeats
        # its input.
        return 0.1 * noise
    return noise * (2.0 / old.shape[-1] ** 0.5)
