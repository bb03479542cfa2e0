"""Parameters that others have and we do not: refused by name unless they change nothing.

Fields that are in no table are ignored, since routers add their own.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from mlx_dp.orchestrator.openai.errors import unsupported

Neutral = Mapping[str, tuple[object, ...]]

_OFF: Final = (None, False)
_NONE: Final = (None,)
_EMPTY: Final[tuple[object, ...]] = (None, [], {}, "")

# All of them would give answers of the form that is asked for, as ours does.
_BACKENDS: Final = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")

# Values are compared with ==, and null is always neutral.
NEUTRAL: Final[Neutral] = MappingProxyType(
    {
        # Tools, structured output, reasoning: OpenAI's names and the servers' own.
        "tools": _EMPTY,
        "tool_choice": (None, "none", "auto"),
        "functions": _EMPTY,
        "function_call": (None, "none", "auto"),
        "reasoning_effort": _NONE,
        "reasoning": _EMPTY,
        "thinking": _NONE,
        "thinking_token_budget": _NONE,
        "guided_decoding_backend": (None, *_BACKENDS),
        "guided_whitespace_pattern": _NONE,
        "structural_tag": _NONE,
        "ebnf": _NONE,
        # Other inputs and outputs.
        "audio": _NONE,
        "modalities": (None, ["text"]),
        "images": _EMPTY,
        "prediction": _NONE,
        "web_search_options": _NONE,
        "documents": _EMPTY,
        "prompt_embeds": _NONE,
        "input_embeds": _NONE,
        "mm_processor_kwargs": _EMPTY,
        "suffix": _EMPTY,
        "store": _OFF,
        "service_tier": (None, "auto", "default"),
        "verbosity": (None, "medium"),
        # Templates and text.
        "chat_template": _NONE,
        "continue_final_message": _OFF,
        "include_stop_str_in_output": _OFF,
        "no_stop_trim": _OFF,
        "detokenize": (None, True),
        "truncate_prompt_tokens": _NONE,
        "stop_regex": _EMPTY,
        # Sampling.
        "use_beam_search": _OFF,
        "length_penalty": (None, 1),
        "early_stopping": _OFF,
        "min_tokens": (None, 0),
        "min_new_tokens": (None, 0),
        "max_new_tokens": _NONE,
        "no_repeat_ngram_size": (None, 0),
        "top_n_sigma": (None, -1, 0),
        "bad_words": _EMPTY,
        "allowed_token_ids": _NONE,
        "logits_processors": _EMPTY,
        "custom_logit_processor": _NONE,
        "custom_params": _EMPTY,
        "repetition_context_size": _NONE,
        "typical_p": (None, 1),
        "top_a": (None, 0),
        "tfs": (None, 1),
        "mirostat": (None, 0),
        "xtc_probability": (None, 0),
        "dry_multiplier": (None, 0),
        "dynatemp_range": (None, 0),
        "prompt_logprobs": _NONE,
        "return_token_ids": _OFF,
        "return_tokens_as_token_ids": _OFF,
        "return_hidden_states": _OFF,
        # Models beside the model, and requests in parts.
        "lora_path": _EMPTY,
        "lora_request": _NONE,
        "adapters": _EMPTY,
        "draft_model": _EMPTY,
        "num_draft_tokens": _NONE,
        "session_params": _EMPTY,
        "kv_transfer_params": _NONE,
        "bootstrap_host": _NONE,
        "bootstrap_room": _NONE,
        "priority": (None, 0),
    }
)
CHAT_NEUTRAL: Final[Neutral] = MappingProxyType(
    {**NEUTRAL, "echo": _OFF, "add_special_tokens": _OFF, "prompt": _NONE}
)
COMPLETION_NEUTRAL: Final[Neutral] = MappingProxyType(
    {**NEUTRAL, "add_special_tokens": (None, True), "top_logprobs": _NONE}
)
_MESSAGE_NEUTRAL: Final[Neutral] = MappingProxyType(
    {"tool_calls": _EMPTY, "tool_call_id": _NONE, "function_call": _NONE, "audio": _NONE}
)


def refuse_unsupported(extras: Mapping[str, Any], neutral: Neutral, *, choices: int) -> None:
    """Raise ApiError for the first known parameter that would change the answer."""
    for name, value in extras.items():
        if name == "best_of" and value not in (None, 1, choices):
            raise unsupported(name, value, f"leave it out, or use n ({choices})")
        if name in neutral and value not in neutral[name]:
            raise unsupported(name, value, "leave it out")


def refuse_message_fields(index: int, extras: Mapping[str, Any]) -> None:
    """The same for the fields of one chat message."""
    for name, value in extras.items():
        if name in _MESSAGE_NEUTRAL and value not in _MESSAGE_NEUTRAL[name]:
            raise unsupported(f"messages.{index}.{name}", value, "leave it out")
