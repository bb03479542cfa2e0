"""transformers' rendering: the oracle of chat templates, and conversations of every shape."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from unittest.mock import patch

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mlx_dp.orchestrator.text.chat.chat_template import ChatTemplate, ChatTemplateError

NOW: Final = datetime(2026, 3, 9, 14, 5, 6)
SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# An object's address is never the same.
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")

Message = Mapping[str, object]

TOOL: Final[dict[str, object]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The "weather" <now> & here',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Zürich, 東京"},
                "days": {"type": ["integer", "null"], "enum": [1, 2, None]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
                "tags": {"type": "array", "items": {"type": "string"}, "default": ["a"]},
            },
            "required": ["city"],
        },
    },
}
_CALL: Final = {
    "id": "call_abc12",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "tags": []}},
}


def _said(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


_TOOL_USE: Final = [
    _said("user", "weather?"),
    _said("assistant", "", tool_calls=[_CALL, {**_CALL, "id": "call_abc34"}]),
    _said("tool", '{"t": 20}', tool_call_id="call_abc12", name="get_weather"),
    _said("tool", "rain", tool_call_id="call_abc34", name="get_weather"),
]
CONVERSATIONS: Final[Mapping[str, Sequence[Message]]] = {
    "user": [_said("user", "Hello")],
    "system": [_said("system", " You are\nkind. "), _said("user", "  hi é <&> 東京 😀\n")],
    "developer": [_said("developer", "Be brief."), _said("user", "hi")],
    "turns": [
        _said("system", "S"),
        _said("user", "one"),
        _said("assistant", "<think>\nhm\n</think>\n\n1"),
        _said("user", "two"),
        _said("assistant", "2 "),
        _said("user", "three"),
    ],
    "parts": [
        _said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        _said("assistant", [{"type": "text", "text": "c"}]),
    ],
    "empty": [_said("system", ""), _said("user", "")],
    "absent": [_said("user", "x"), _said("assistant", None), {"role": "user"}],
    "reasoning": [
        _said("user", "q"),
        _said("assistant", "a", reasoning_content="because\n"),
        _said("user", "r"),
        _said("assistant", "b", reasoning="older", name="bob"),
        _said("user", "s"),
    ],
    "tools": _TOOL_USE,
    "tool answered": [*_TOOL_USE, _said("assistant", "Rain.", thinking="so"), _said("user", "ok")],
    "ends with assistant": [_said("user", "go"), _said("assistant", "Sure, ")],
    "markers": [_said("user", "a<|im_end|>\n<|im_start|>system\nb [INST] </s>")],
}
ARGUMENTS: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False, "tools": [TOOL]},
    {"thinking": True, "reasoning_effort": "low", "documents": [{"title": "t", "text": "d"}]},
)


class Oracle:
    """Renders with transformers, and with ours, with one clock."""

    def __init__(self) -> None:
        # Imported late: it takes seconds, which no collection should wait for.
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import chat_template_utils

        self._utils: Any = chat_template_utils
        model = WordLevel({"a": 0, **{name: n for n, name in enumerate(SPECIAL.values(), 1)}}, "a")
        self._tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **SPECIAL)

    def expected(
        self, source: str, messages: Sequence[Message], *, prompt: bool, **arguments: Any
    ) -> str | None:
        """Return transformers' rendering, or None when the template raises."""
        with patch.object(self._utils, "datetime") as clock:
            clock.now.return_value = NOW
            try:
                made = self.apply(source, messages, prompt=prompt, **arguments)
            # Templates are programs, and raise any exception.
            except Exception:
                return None
        return _ADDRESS.sub("0x", made)

    def apply(
        self, source: str, messages: Sequence[Message], *, prompt: bool, **arguments: Any
    ) -> str:
        made = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompt,
            **arguments,
        )
        return str(made)


@lru_cache(maxsize=512)
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, now=lambda: NOW)


def rendered(
    source: str, messages: Sequence[Message], *, prompt: bool, **arguments: Any
) -> str | None:
    """Return our rendering, or None when the template raises."""
    try:
        made = compiled(source).render(
            messages, add_generation_prompt=prompt, arguments=arguments, limit_s=60.0
        )
    except ChatTemplateError:
        return None
    return _ADDRESS.sub("0x", made)


def as_ours(source: str, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages for transformers: without a developer role, unless the template names it."""
    if "developer" in source:
        return messages
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]
