"""The text side of the fake engine. Every byte is a token, so it needs no model."""

from collections.abc import Mapping, Sequence
from typing import Final

from mlx_dp.orchestrator.text.detokenizer import ByteDetokenizer, Detokenizer
from mlx_dp.orchestrator.text.text_model import Chat, ModelFacts, RenderedChat

END_OF_TEXT: Final = 256
END_OF_TEXT_NAME: Final = "<|end|>"


class FakeTextModel:
    """Ids 0 to 255 are bytes, 256 is the end token, further ids are special tokens.

    With a vocabulary below 256, bytes wrap around, so that every text stays in range. Chats are
    rendered as ``role: content`` lines.
    """

    def __init__(self, vocab_size: int, context_length: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._facts = ModelFacts(
            path="fake",
            model_type="fake",
            architectures=("FakeEngine",),
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=(END_OF_TEXT,) if vocab_size > END_OF_TEXT else (),
            follows_grammars=False,
        )
        self._shown = [bytes([token]) for token in range(256)]

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def render_chat(self, chat: Chat, *, limit_s: float) -> RenderedChat:
        lines = [f"{_role(message)}: {message['content']}\n" for message in chat.messages]
        if chat.add_generation_prompt:
            lines.append("assistant: ")
        return RenderedChat("".join(lines))

    def encode_chat(self, chat: RenderedChat) -> tuple[int, ...]:
        # Text never becomes a special token here.
        return self.encode(chat.text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        data = text.encode()
        if self._vocab_size >= 256:
            return tuple(data)
        return tuple(byte % self._vocab_size for byte in data)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = self._shown_bytes if skip_special_tokens else self.token_bytes
        return b"".join(map(shown, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._shown[token] if token < 256 else self.special_text(token).encode()

    def special_text(self, token: int) -> str:
        if token < 256:
            return ""
        return END_OF_TEXT_NAME if token == END_OF_TEXT else f"<|{token}|>"

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self.token_bytes)

    def _shown_bytes(self, token: int) -> bytes:
        return self._shown[token] if token < 256 else b""


def _role(message: Mapping[str, object]) -> object:
    """Render developers as system, like most templates."""
    return "system" if message["role"] == "developer" else message["role"]
