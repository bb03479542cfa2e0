"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.numbers import INTEGRAL, MINUS_ONE_IS_UNSET
from mlx_dp.orchestrator.formats.openai.chat_message import ChatMessage
from mlx_dp.orchestrator.formats.openai.fields import CompletionFields
from mlx_dp.orchestrator.text.text_model import Chat
from mlx_dp.proto.messages.sampling_params import MAX_TOP_LOGPROBS

MAX_MESSAGES: Final = 16_384
# Clients may set these variables of a template, and no others.
TEMPLATE_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})
_EFFORT: Final = "reasoning_effort"

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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
