"""Fixtures that make models: the real demo model, and a tiny llama as a GGUF file.

A pytest plugin; MLX is imported only by the fixtures that need it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from mlx_dp.orchestrator.model.model_source import resolve_model
from tests.support.models.silent_progress import SilentProgress

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model in float32, fetched once through the production path."""
    cache_dir = os.environ.get("MLX_DP_CACHE") or platformdirs.user_cache_dir("mlx-dp")
    resolved = resolve_model(
        None, revision=None, cache_dir=Path(cache_dir), progress=SilentProgress(), device="cpu"
    )
    return resolved.path


@dataclass
class TinyGguf:
    """A llama of 2 layers in GGUF's names and row order, with every byte in its vocabulary.

    ``model`` is the mlx-lm model that it was made from; tests may change both dicts before
    writing.
    """

    model: Any
    config: dict[str, Any]
    arrays: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        import mlx.core as mx

        mx.save_gguf(str(path), self.arrays, self.metadata)
        return path


@pytest.fixture
def make_gguf() -> Callable[..., TinyGguf]:
    """Makes a ``TinyGguf``; keywords change its mlx-lm config."""
    return _tiny_gguf


def _tiny_gguf(**changes: Any) -> TinyGguf:
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ t", "h e", "Ġt he"]
    tokens = [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(tokens),
        "max_position_embeddings": 128,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
    } | changes
    mx.random.seed(7)
    model = Model(ModelArgs.from_dict(config))
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(64, dtype=mx.uint32),
        "llama.block_count": mx.array(2, dtype=mx.uint32),
        "llama.feed_forward_length": mx.array(96, dtype=mx.uint32),
        "llama.attention.head_count": mx.array(4, dtype=mx.uint32),
        "llama.attention.head_count_kv": mx.array(2, dtype=mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.context_length": mx.array(128, dtype=mx.uint32),
        "llama.rope.freq_base": mx.array(5000.0),
        "llama.rope.dimension_count": mx.array(16, dtype=mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": mx.array(
            [3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)), dtype=mx.int32
        ),
        "tokenizer.ggml.bos_token_id": mx.array(1, dtype=mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, dtype=mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, dtype=mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(2, dtype=mx.uint32),
        "tokenizer.chat_template": TEMPLATE,
    }
    return TinyGguf(model=model, config=config, arrays=_gguf_arrays(model), metadata=metadata)


def _gguf_arrays(model: Any) -> dict[str, Any]:
    from mlx.utils import tree_flatten

    outer = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    inner = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    arrays = {}
    for name, array in tree_flatten(model.parameters()):
        module = name.removesuffix(".weight")
        if module in outer:
            arrays[f"{outer[module]}.weight"] = array
            continue
        _, _, layer, part = module.split(".", 3)
        if part in heads:
            # As llama.cpp's converter writes them: the two rotated halves interleaved.
            rows = array.reshape(heads[part], 2, -1, array.shape[-1])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        arrays[f"blk.{layer}.{inner[part]}.weight"] = array
    return arrays
