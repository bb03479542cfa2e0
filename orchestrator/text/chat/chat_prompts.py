"""Turns chats into prompts and token ids for one model. Conversation text stays text."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from mlx_dp.orchestrator.text.chat.chat_encoder import ChatEncoder
from mlx_dp.orchestrator.text.chat.chat_renderer import (
    ChatRenderer,
    probe_prompts,
    template_literals,
)
from mlx_dp.orchestrator.text.chat.chat_template import LIMIT_S, ChatTemplate, Rendering
from mlx_dp.orchestrator.text.chat.control_tokens import control_tokens
from mlx_dp.orchestrator.text.text_model import Chat, RenderedChat


class ChatPrompts:
    """Renders with the model's template, and encodes with its tokenizer.

    ``end_ids``: the model's end tokens. ``unknown``: the tokenizer's unknown token.
    """

    def __init__(
        self,
        template: ChatTemplate,
        source: str,
        tokenizer: Tokenizer,
        *,
        end_ids: Sequence[int],
        unknown: str | None,
    ) -> None:
        self._template = template
        literals = template_literals(source)
        tokens = control_tokens(
            tokenizer.get_added_tokens_decoder(),
            end_ids=end_ids,
            unknown=unknown,
            written=[*literals, *probe_prompts(lambda chat: self._rendering(chat, LIMIT_S).text)],
        )
        normalizer = tokenizer.normalizer if tokens.any_normalized else None
        self._renderer = ChatRenderer(
            tokens, literals, None if normalizer is None else normalizer.normalize_str
        )
        self._encoder = ChatEncoder(tokenizer, tokens)

    def render(self, chat: Chat, *, limit_s: float) -> RenderedChat:
        """Return the prompt. Each rendering has ``limit_s``. Raises ChatTemplateError."""
        return self._renderer.render(chat, lambda changed: self._rendering(changed, limit_s))

    def encode(self, chat: RenderedChat) -> tuple[int, ...]:
        """Return its token ids. Raises ChatTemplateError."""
        return self._encoder.encode(chat)

    def _rendering(self, chat: Chat, limit_s: float) -> Rendering:
        return self._template.rendering(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            arguments=chat.arguments,
            limit_s=limit_s,
        )
