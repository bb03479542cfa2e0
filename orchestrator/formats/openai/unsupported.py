"""Parameters of other servers that this one lacks: refused by name unless they change nothing.

Fields in no table are ignored, since routers add their own, and since some have no effect on the
answer here: ``user``, ``metadata``, ``store``, ``service_tier``, ``priority``, ``verbosity``,
``prompt_cache_key``, ``safety_identifier``, ``parallel_tool_calls`` and their like.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from mlx_dp.orchestrator.formats.common.errors import unsupported
from mlx_dp.orchestrator.formats.common.validation import same_value
from mlx_dp.orchestrator.formats.openai.fields import NEUTRAL_SAMPLING, CompletionFields

Neutral = Mapping[str, tuple[object, ...]]

_OFF: Final = (None, False)
_NONE: Final = (None,)
_EMPTY: Final[tuple[object, ...]] = (None, [], {}, "")

# Each of them gives answers of the requested form, as the built-in one does.
_BACKENDS: Final = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")

# Values are compared by ``same_value``, and null is always neutral.
NEUTRAL: Final[Neutral] = MappingProxyType(
    {
        # Tools, structured output, reasoning: OpenAI's names and the servers' own.
        "tools": _EMPTY,
        "tool_choice": (None, "none", "auto"),
        "functions": _EMPTY,
        "function_call": (None, "none", "auto"),
        "reasoning": _EMPTY,
        "thinking": _NONE,
        "thinking_token_budget": (None, -1),
        "guided_decoding_backend": (None, *_BACKENDS),
        "guided_whitespace_pattern": _EMPTY,
        "structural_tag": _EMPTY,
        "ebnf": _EMPTY,
        # Other inputs and outputs.
        "audio": _NONE,
        "modalities": (None, [], ["text"]),
        "images": _EMPTY,
        "prediction": _NONE,
        "web_search_options": _NONE,
        "documents": _EMPTY,
        "prompt_embeds": _EMPTY,
        "input_embeds": _EMPTY,
        "mm_processor_kwargs": _EMPTY,
        "suffix": _EMPTY,
        # Templates and text.
        "chat_template": _EMPTY,
        "continue_final_message": _OFF,
        "include_stop_str_in_output": _OFF,
        "no_stop_trim": _OFF,
        "detokenize": (None, True),
        "truncate_prompt_tokens": _NONE,
        "stop_regex": _EMPTY,
        **NEUTRAL_SAMPLING,
        # Other outputs.
        "prompt_logprobs": (None, False, 0),
        "return_tokens_as_token_ids": _OFF,
        "return_hidden_states": _OFF,
        # Models beside the model, and requests in parts.
        "lora_path": _EMPTY,
        "lora_request": _EMPTY,
        "adapters": _EMPTY,
        "draft_model": _EMPTY,
        "session_params": _EMPTY,
        "kv_transfer_params": _EMPTY,
        "bootstrap_host": _NONE,
        "bootstrap_room": _NONE,
    }
)
CHAT_NEUTRAL: Final[Neutral] = MappingProxyType(
    {**NEUTRAL, "echo": _OFF, "add_special_tokens": _OFF, "prompt": _NONE}
)
COMPLETION_NEUTRAL: Final[Neutral] = MappingProxyType(
    {
        **NEUTRAL,
        "add_special_tokens": (None, True),
        "top_logprobs": (None, False, 0, -1),
        "reasoning_effort": _NONE,
    }
)
# Fields that a choice of "none" turns off.
_CHOSEN_BY: Final[Mapping[str, str]] = MappingProxyType(
    {"tools": "tool_choice", "functions": "function_call"}
)
# mlx_lm's windows: the number of last tokens that a penalty counts. Here it counts all tokens.
_WINDOWS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "repetition_context_size": "repetition_penalty",
        "presence_context_size": "presence_penalty",
        "frequency_context_size": "frequency_penalty",
    }
)
_DEFAULT_WINDOW: Final = 20
_NO_PENALTY: Final[Mapping[str, float]] = MappingProxyType(
    {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
)


def refuse_unsupported(fields: CompletionFields, neutral: Neutral) -> None:
    """Raise ApiError for the first known parameter that would change the answer."""
    for name, value in fields.extras.items():
        if name in _CHOSEN_BY and fields.extras.get(_CHOSEN_BY[name]) == "none":
            continue
        if name == "best_of" and not _is_one_of(value, (None, 1, fields.choices)):
            raise unsupported(name, value, f"leave it out, or use n ({fields.choices})")
        if name in _WINDOWS and not _is_neutral_window(fields, name, value):
            raise unsupported(name, value, f"{_WINDOWS[name]} counts all tokens here: leave it out")
        if name in neutral and not _is_one_of(value, neutral[name]):
            raise unsupported(name, value, "leave it out")


def _is_one_of(value: object, neutral: Iterable[object]) -> bool:
    return any(same_value(value, each) for each in neutral)


def _is_neutral_window(fields: CompletionFields, name: str, value: object) -> bool:
    """Whether the penalty is off, or the size is the default that clients send."""
    penalty = getattr(fields, _WINDOWS[name])
    if penalty in (None, _NO_PENALTY[_WINDOWS[name]]):
        return True
    return _is_one_of(value, (None, 0, _DEFAULT_WINDOW))
