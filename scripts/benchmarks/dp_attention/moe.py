"""A random mixture of experts, whose experts are nine tenths of its weights, with a tokenizer."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarks.engine.models import write_hybrid

MOE: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 16384,
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 272,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
"""297 MB in float32, of which the experts are 267; each token runs through 4 of 32."""


def write_moe(directory: Path, tokenizer_of: Path, config: Mapping[str, Any] = MOE) -> Path:
    """Write the model, with the other model's tokenizer cut to its vocabulary."""
    write_hybrid(directory, config)
    tokenizer = json.loads((tokenizer_of / "tokenizer.json").read_text())
    shortened = shorten(tokenizer, config["vocab_size"])
    (directory / "tokenizer.json").write_text(json.dumps(shortened))
    shutil.copy(tokenizer_of / "tokenizer_config.json", directory)
    return directory


def shorten(tokenizer: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Keep the first tokens of a byte-level BPE, and the merges that make them.

    Tokens are numbered in the order of merges, so the parts of a token come before it.
    """
    model = tokenizer["model"]
    kept = {token: index for token, index in model["vocab"].items() if index < vocab_size}
    merges = [merge for merge in model["merges"] if _joined(merge) in kept]
    return {**tokenizer, "model": {**model, "vocab": kept, "merges": merges}}


def _joined(merge: Any) -> str:
    """A merge is a pair; in older files it is a string with a space between both."""
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
