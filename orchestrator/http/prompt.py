"""Prompts to token ids, off the event loop when that takes long."""

import asyncio
from typing import Final

from mlx_dp.orchestrator.openai.completion_request import Prompt
from mlx_dp.orchestrator.openai.errors import ApiError, invalid
from mlx_dp.orchestrator.text.chat_template import ChatTemplateError
from mlx_dp.orchestrator.text.text_model import Chat, TextModel
from mlx_dp.proto.admission import AdmissionLimits

# About a millisecond of work; a hop to a thread and back costs a fifth of one.
INLINE_CHARS: Final = 4096
# Hardly any text has more characters in a token than this, on the mean.
CHARS_PER_TOKEN: Final = 8
# Cutting a text changes few tokens, and only beside the cut.
TOKENS_AT_A_CUT: Final = 64


async def prompt_ids(
    text: TextModel, prompt: Prompt | Chat, limits: AdmissionLimits | None, *, param: str
) -> tuple[int, ...]:
    """Return the token ids. Raises ApiError when there are none or certainly too many."""
    if isinstance(prompt, tuple):
        ids = prompt
    elif _num_chars(prompt) <= INLINE_CHARS:
        ids = _tokenize(text, prompt, limits, param)
    else:
        # The tokenizer releases the interpreter lock while it works.
        ids = await asyncio.to_thread(_tokenize, text, prompt, limits, param)
    if not ids:
        raise invalid(param, "the prompt is empty: at least 1 token is needed")
    return ids


def _num_chars(prompt: str | Chat) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(value)) for message in prompt.messages for value in message.values())


def _tokenize(
    text: TextModel, prompt: str | Chat, limits: AdmissionLimits | None, param: str
) -> tuple[int, ...]:
    rendered = _render(text, prompt) if isinstance(prompt, Chat) else prompt
    special = isinstance(prompt, str)
    most = None if limits is None else limits.max_request_tokens
    if most is not None and len(rendered) > CHARS_PER_TOKEN * (most + TOKENS_AT_A_CUT):
        # Too long, most likely: find out without tokenizing all of it.
        start = rendered[: CHARS_PER_TOKEN * (most + TOKENS_AT_A_CUT)]
        if len(text.encode(start, add_special_tokens=special)) >= most + TOKENS_AT_A_CUT:
            raise ApiError(
                400,
                f"{param}: the prompt of {len(rendered)} characters has more than {most} tokens, "
                "which is the most that a request may have here, its answer included",
                param=param,
                code="context_length_exceeded",
            )
    return text.encode(rendered, add_special_tokens=special)


def _render(text: TextModel, chat: Chat) -> str:
    try:
        return text.render_chat(chat)
    except ChatTemplateError as error:
        raise invalid("messages", f"the chat template refuses them: {error}") from error
