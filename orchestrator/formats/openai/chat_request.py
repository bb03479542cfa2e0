"""The body of POST /v1/chat/completions, and its messages as templates take them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from mlx_dp.orchestrator.formats.common.errors import invalid, unsupported
from mlx_dp.orchestrator.formats.common.validation import (
    INTEGRAL,
    MINUS_ONE_IS_UNSET,
    STRICT,
    refuse,
)
from mlx_dp.orchestrator.formats.openai.fields import CompletionFields
from mlx_dp.orchestrator.text.text_model import Chat, Role
from mlx_dp.proto.messages.sampling_params import MAX_TOP_LOGPROBS

MAX_MESSAGES: Final = 16_384
MAX_PARTS: Final = 1024
MAX_TOOL_CALLS: Final = 1024
MAX_NAME_CHARS: Final = 256
# Clients may set these variables of a template, and no others.
TEMPLATE_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})

# Part types, and the member with their text.
_TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_REASONING_PARTS: Final[Mapping[str, str]] = {"thinking": "thinking", "reasoning": "text"}
# Encrypted by another server: no model here could read them.
_OPAQUE_PARTS: Final = frozenset({"redacted_thinking"})
_ANSWER_PARTS: Final = frozenset({"refusal", *_REASONING_PARTS, *_OPAQUE_PARTS})
_SPEAKERS: Final = ("system", "developer", "user")
_KNOWN_PARTS: Final = (*_TEXT_PARTS, *_REASONING_PARTS, *_OPAQUE_PARTS)
_OTHER_PARTS: Final = ", ".join(kind for kind in _KNOWN_PARTS if kind != "text")
_PART_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": _KNOWN_PARTS}}},
    ]
}
_EFFORT: Final = "reasoning_effort"

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A message's text and reasoning.

    ``answer_part`` is the type of a part that only answers may have, or None.
    """

    text: str = ""
    reasoning: str = ""
    answer_part: str | None = None


def _content(value: object) -> MessageContent | None:
    """Return a message's content. Parts are joined without a separator, as templates do."""
    if value is None:
        return None
    if isinstance(value, str):
        return MessageContent(value)
    if not isinstance(value, list):
        raise refuse("input should be a string or an array of text parts", value)
    if len(value) > MAX_PARTS:
        raise refuse(f"input should have at most {MAX_PARTS} parts")
    texts: list[str] = []
    reasoning: list[str] = []
    answer_part = None
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _KNOWN_PARTS:
            raise refuse(
                f"only parts of type 'text' are supported (and in answers {_OTHER_PARTS})", kind
            )
        if kind in _ANSWER_PARTS:
            answer_part = kind
        if kind in _TEXT_PARTS:
            texts.append(_part_text(part, _TEXT_PARTS[kind]))
        elif kind in _REASONING_PARTS:
            reasoning.append(_reasoning_text(part, _REASONING_PARTS[kind]))
    return MessageContent("".join(texts), "".join(reasoning), answer_part)


def _part_text(part: Mapping[str, object], member: str) -> str:
    text = part.get(member)
    if text is None and part.get("type") != "text":
        return ""
    if not isinstance(text, str):
        raise refuse(f"the {member} of each part should be a string", text)
    return text


def _reasoning_text(part: Mapping[str, object], member: str) -> str:
    """Return the text of a reasoning part. The Responses API sends a list of summaries."""
    text = part.get(member)
    if isinstance(text, str):
        return text
    for name in ("content", "summary"):
        entries = part.get(name)
        if isinstance(entries, list) and entries:
            texts = [entry.get("text") for entry in entries if isinstance(entry, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def _tool_calls(value: object) -> list[dict[str, object]]:
    """Return earlier calls as templates expect them, with arguments as objects."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("input should be an array of calls", value)
    if len(value) > MAX_TOOL_CALLS:
        raise refuse(f"input should have at most {MAX_TOOL_CALLS} calls")
    return [_tool_call(call) for call in value]


def _tool_call(call: object) -> dict[str, object]:
    if not isinstance(call, dict):
        raise refuse("each call should be an object with a function", call)
    kind = call.get("type") or "function"
    function = call.get(kind) if kind in ("function", "custom") else None
    if not isinstance(function, dict):
        raise refuse("each call should have a function with name and arguments", function)
    found = _function(function)
    if kind == "custom":
        found["arguments"] = {"input": function.get("input")}
    identity = call.get("id")
    return {**({"id": identity} if isinstance(identity, str) else {}), **_as_call(found)}


def _as_call(function: Mapping[str, object]) -> dict[str, object]:
    return {"type": "function", "function": function}


def _function(function: Mapping[str, object]) -> dict[str, object]:
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise refuse(f"the function's name should have 1 to {MAX_NAME_CHARS} characters", name)
    return {"name": name, "arguments": _arguments(function.get("arguments"))}


def _arguments(value: object) -> object:
    if isinstance(value, dict):
        return value
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        raise refuse("the function's arguments should be JSON of an object", value)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        # An answer that was cut within its arguments: the template gets the text.
        return value
    return parsed if isinstance(parsed, dict) else value


def _function_call(value: object) -> dict[str, object] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse("input should be an object with name and arguments", value)
    return _as_call(_function(value))


def _text(value: object) -> str:
    """Return the value if it is text. Answers of other servers may have any value here."""
    return value if isinstance(value, str) else ""


Content = Annotated[
    MessageContent | None,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "maxItems": MAX_PARTS, "items": _PART_SCHEMA},
                {"type": "null"},
            ]
        }
    ),
]
ToolCalls = Annotated[
    list[dict[str, object]],
    PlainValidator(_tool_calls),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "maxItems": MAX_TOOL_CALLS, "items": {"type": "object"}},
                {"type": "null"},
            ]
        }
    ),
]
FunctionCall = Annotated[
    dict[str, object] | None,
    PlainValidator(_function_call),
    WithJsonSchema({"type": ["object", "null"]}),
]
# Any other value is ignored: it is no reason to refuse a conversation.
LooseText = Annotated[str, PlainValidator(_text), WithJsonSchema({})]


class ChatMessage(BaseModel):
    """One message as a client sends it.

    An assistant's message is mostly an earlier answer of this server or another one, in the form in
    which its client keeps it. Everything that such an answer can hold is accepted:

    - ``content`` that is null, missing or an empty array is "", as in SGLang, vLLM and
      mlx_lm.server;
    - parts of type text, output_text, input_text and refusal are joined as they are; beside an
      empty ``content``, a ``refusal`` is the content, or else the transcript of an ``audio``;
    - parts of type thinking and reasoning, and ``reasoning_content`` or ``reasoning``, are passed
      to the template, which decides what to show;
    - ``tool_calls``, and ``function_call`` as one of them, are passed with their arguments as
      objects, as templates expect; a message of role ``tool`` (or ``function``) is their result;
    - ``annotations`` and unknown members are ignored, and null is the same as a missing member.
    """

    model_config = STRICT

    role: Role
    content: Content = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    reasoning_content: LooseText = ""
    reasoning: LooseText = ""
    refusal: LooseText = ""
    audio: Any = None
    tool_calls: ToolCalls = []
    function_call: FunctionCall = None
    tool_call_id: LooseText = ""
    prefix: Any = None
    """True: the answer continues this message (DeepSeek, Mistral)."""
    partial: Any = None
    """The same (Kimi, Qwen)."""

    def check(self, place: str, *, last: bool) -> None:
        """Raise ApiError if this server cannot use the message. ``place`` names it in errors."""
        content = self.content
        if content is None and self.role in _SPEAKERS:
            raise invalid(f"{place}.content", "this field is required, as text or text parts")
        if self.audio and not self._spoken_text:
            raise unsupported(f"{place}.audio", self.audio, "send its transcript as content")
        if self.role == "assistant":
            for name in ("prefix", "partial"):
                if last and getattr(self, name) is True:
                    raise unsupported(f"{place}.{name}", True, "end with a user message")
            return
        if content is not None and content.answer_part is not None:
            raise invalid(
                f"{place}.content",
                f"only messages of role 'assistant' have parts of type '{content.answer_part}'",
            )
        for name in ("tool_calls", "function_call"):
            if getattr(self, name):
                raise invalid(f"{place}.{name}", "only messages of role 'assistant' have calls")

    def as_mapping(self) -> Mapping[str, object]:
        """Return the message as templates take it, without absent members."""
        found: dict[str, object] = {"role": self._role, "content": self._content_text}
        optional: dict[str, object] = {"name": self.name}
        match self.role:
            case "assistant":
                calls = [*self.tool_calls, *filter(None, [self.function_call])]
                optional |= {**self._thoughts, "tool_calls": calls}
            case "tool" | "function":
                optional["tool_call_id"] = self.tool_call_id
        return found | {name: value for name, value in optional.items() if value}

    @property
    def _role(self) -> str:
        # Templates know only the newer name of a tool. They decide about "developer".
        return "tool" if self.role == "function" else self.role

    @property
    def _content_text(self) -> str:
        text = "" if self.content is None else self.content.text
        if text or self.role != "assistant":
            return text
        return self.refusal or self._spoken_text

    @property
    def _thoughts(self) -> Mapping[str, object]:
        """Return the reasoning under the client's name. Rendering adds the template's names."""
        if self.reasoning and not self.reasoning_content:
            return {"reasoning": self.reasoning}
        parts = "" if self.content is None else self.content.reasoning
        return {"reasoning_content": self.reasoning_content or parts}

    @property
    def _spoken_text(self) -> str:
        if self.role != "assistant" or not isinstance(self.audio, dict):
            return ""
        return _text(self.audio.get("transcript"))


class ChatRequest(CompletionFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[
        Annotated[int, Field(ge=-1, le=MAX_TOP_LOGPROBS), INTEGRAL] | None, MINUS_ONE_IS_UNSET
    ] = None
    add_generation_prompt: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def requested_logprobs(self) -> int | None:
        """Return the number of alternatives at each token, or None. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "it needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self) -> Chat:
        """Check the messages and return the conversation. Raises ApiError."""
        last = len(self.messages) - 1
        for index, message in enumerate(self.messages):
            message.check(f"messages.{index}", last=index == last)
        return Chat(
            messages=[message.as_mapping() for message in self.messages],
            add_generation_prompt=self.add_generation_prompt is not False,
            arguments={**self._effort(), **self._template_arguments()},
        )

    def _effort(self) -> Mapping[str, object]:
        """Return the template variables of the effort. "none" also turns thinking off."""
        if self.reasoning_effort is None:
            return {}
        off = dict.fromkeys(TEMPLATE_SWITCHES, False) if self.reasoning_effort == "none" else {}
        return {_EFFORT: self.reasoning_effort, **off}

    def _template_arguments(self) -> Mapping[str, object]:
        given = self.chat_template_kwargs or {}
        arguments = {name: value for name, value in given.items() if value is not None}
        for name, value in arguments.items():
            if name == _EFFORT:
                if value not in get_args(ReasoningEffort):
                    raise invalid(
                        f"chat_template_kwargs.{name}",
                        f"input should be one of {', '.join(get_args(ReasoningEffort))}",
                    )
            elif name not in TEMPLATE_SWITCHES:
                known = ", ".join(sorted({*TEMPLATE_SWITCHES, _EFFORT}))
                raise invalid("chat_template_kwargs", f"{ascii(name)[:40]} is not among {known}")
            elif not isinstance(value, bool):
                raise invalid(f"chat_template_kwargs.{name}", "input should be true or false")
        return arguments
