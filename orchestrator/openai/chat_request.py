"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from mlx_dp.orchestrator.openai.errors import invalid
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.openai.unsupported import refuse_message_fields
from mlx_dp.orchestrator.openai.validation import STRICT, refuse
from mlx_dp.orchestrator.text.text_model import Chat
from mlx_dp.proto.sampling_params import MAX_TOP_LOGPROBS

MAX_MESSAGES: Final = 16_384
MAX_PARTS: Final = 1024
# Whatever else a template reads is not the client's to set.
TEMPLATE_ARGUMENTS: Final = frozenset({"enable_thinking", "thinking"})


def _content(value: object) -> str:
    """A message's text; parts are joined as they are, as templates do it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("input should be a string or an array of text parts")
    if len(value) > MAX_PARTS:
        raise refuse(f"input should have at most {MAX_PARTS} parts")
    pieces: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refuse("only parts of type 'text' are supported", kind)
        text = part.get("text")
        if not isinstance(text, str):
            raise refuse("the text of each part should be a string", text)
        pieces.append(text)
    return "".join(pieces)


Content = Annotated[
    str,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "maxItems": MAX_PARTS,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        }
    ),
]


class ChatMessage(BaseModel):
    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=256)] | None = None

    def as_mapping(self) -> Mapping[str, object]:
        # The template decides what a developer is: most know the older name only.
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


class ChatRequest(GenerationFields):
    prompt_name: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "it needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self) -> Chat:
        """The conversation, checked. Raises ApiError."""
        for index, message in enumerate(self.messages):
            refuse_message_fields(index, message.model_extra or {})
        arguments = self.chat_template_kwargs or {}
        for name, value in arguments.items():
            if name not in TEMPLATE_ARGUMENTS:
                raise invalid(
                    "chat_template_kwargs",
                    f"{ascii(name)[:40]} is not among {', '.join(sorted(TEMPLATE_ARGUMENTS))}",
                )
            if not isinstance(value, bool):
                raise invalid(f"chat_template_kwargs.{name}", "input should be true or false")
        return Chat(
            messages=[message.as_mapping() for message in self.messages],
            add_generation_prompt=self.add_generation_prompt is not False,
            arguments=arguments,
        )
