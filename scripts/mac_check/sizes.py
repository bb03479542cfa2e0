"""The sizes of scripts/mac-check's measurements, and the models that it makes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

DENSE: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""Many layers, since buffers and launches are per layer; little arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """``layers`` of the model, ``requests`` for the buffers, ``steps`` per measured time."""

    layers: int
    requests: int
    steps: int
    prompt: int
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    idle_s: float
    tests: tuple[str, ...]
    all_tests: bool = False
    output: Path = Path()

    @property
    def config(self) -> Mapping[str, Any]:
        return {**DENSE, "num_hidden_layers": self.layers}

    def with_output(self, output: Path) -> Self:
        return replace(self, output=output)

    def asked(self, *, all_tests: bool, idle_s: float | None) -> Self:
        """The sizes, with the options of the command line."""
        return replace(self, all_tests=all_tests, idle_s=self.idle_s if idle_s is None else idle_s)


FULL = Sizes(
    layers=30,
    requests=3000,
    steps=40,
    prompt=6000,
    widths=(256, 2048, 8192),
    rows=(1, 2, 4, 8),
    idle_s=70.0,
    tests=(
        "tests/kvcache/batch/test_batch_caches.py",
        "tests/kvcache/batch/test_attention.py",
        "tests/worker/loading/test_device.py",
        "tests/worker/loading/test_batch_check.py",
        "tests/worker/loading/test_padding_check.py",
        "tests/worker/engine/test_mlx_engine.py",
        "tests/worker/engine/test_engine_memory.py",
        "tests/worker/engine/test_prefix_buffers.py",
        "tests/worker/engine/test_tiny_model_oracle.py",
        "tests/system/test_serve_mlx.py",
    ),
)
QUICK = Sizes(
    layers=3,
    requests=6,
    steps=4,
    prompt=300,
    widths=(256, 512),
    rows=(1, 2),
    idle_s=0.0,
    tests=("tests/worker/loading/test_device.py",),
)
