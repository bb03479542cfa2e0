"""Turns prompts into token ids, off the event loop when that takes long."""

import asyncio
import logging
from typing import Final

from mlx_dp.orchestrator.formats.common.errors import invalid, too_long
from mlx_dp.orchestrator.formats.common.generation_request import Prompt
from mlx_dp.orchestrator.text.chat.chat_template import (
    LIMIT_S,
    ChatTemplateError,
    ChatTemplateTimeoutError,
)
from mlx_dp.orchestrator.text.text_model import Chat, RenderedChat, TextModel
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, prompt_overflow

logger = logging.getLogger(__name__)

# About a millisecond of work; a hop to a thread and back costs a fifth of one.
INLINE_CHARS: Final = 4096
# A template that needs more than this would delay all running answers.
INLINE_LIMIT_S: Final = 0.02
# Hardly any text has a higher mean of characters in a token.
CHARS_PER_TOKEN: Final = 8
# Cutting a text changes few tokens, and only near the cut.
TOKENS_AT_A_CUT: Final = 64


async def prompt_ids(
    text: TextModel, prompt: Prompt | Chat, limits: AdmissionLimits | None, *, param: str
) -> tuple[int, ...]:
    """Return the token ids. Raises ApiError when there are none or certainly too many."""
    if isinstance(prompt, tuple):
        ids = prompt
    else:
        try:
            ids = await _tokenize(text, prompt, limits, param)
        except ChatTemplateError as error:
            raise invalid(param, f"the chat template rejects them: {error}") from error
    if not ids:
        raise invalid(param, "the prompt is empty: at least 1 token is needed")
    return ids


def _num_chars(prompt: str | Chat) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(value)) for message in prompt.messages for value in message.values())


async def _tokenize(
    text: TextModel, prompt: str | Chat, limits: AdmissionLimits | None, param: str
) -> tuple[int, ...]:
    if _num_chars(prompt) <= INLINE_CHARS:
        try:
            return _ids(text, prompt, limits, param, INLINE_LIMIT_S)
        except ChatTemplateTimeoutError:
            logger.debug("a chat template is slow: once more, off the event loop")
    # The tokenizer releases the interpreter lock while it works.
    return await asyncio.to_thread(_ids, text, prompt, limits, param, LIMIT_S)


def _ids(
    text: TextModel,
    prompt: str | Chat,
    limits: AdmissionLimits | None,
    param: str,
    limit_s: float,
) -> tuple[int, ...]:
    chat: RenderedChat | None = None
    if isinstance(prompt, str):
        rendered = prompt
    else:
        chat = text.render_chat(prompt, limit_s=limit_s)
        rendered = chat.text
    if limits is not None:
        _refuse_long(text, rendered, limits, param, special=chat is None)
    if chat is not None:
        return text.encode_chat(chat)
    return text.encode(rendered, add_special_tokens=True)


def _refuse_long(
    text: TextModel, rendered: str, limits: AdmissionLimits, param: str, *, special: bool
) -> None:
    """Raise ApiError for a prompt that is too long, without tokenizing all of it."""
    most = limits.max_request_tokens
    if len(rendered) > CHARS_PER_TOKEN * (most + TOKENS_AT_A_CUT):
        start = rendered[: CHARS_PER_TOKEN * (most + TOKENS_AT_A_CUT)]
        least = len(text.encode(start, add_special_tokens=special)) - TOKENS_AT_A_CUT
        if least >= most:
            size = f"{least} tokens or more ({len(rendered)} characters)"
            raise too_long(param, prompt_overflow(limits, size))
