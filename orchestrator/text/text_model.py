"""The text side of a model as the HTTP side sees it: text in, token ids out, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlx_dp.orchestrator.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling where the client says nothing: the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's files say about it."""

    path: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    """Token ids that the text side knows; the model's own table may be larger."""
    context_length: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    follows_grammars: bool = True
    """Whether its engine can hold an answer to a grammar: the fake one cannot."""


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""Values of ``role`` in a message, as the API takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be rendered; ``arguments`` are passed on to the template."""

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a chat, as the template writes it."""

    text: str
    marked: str | None = None
    """The same, with other characters where text of the conversation would pass for control tokens.

    Those that are left are the template's own. None if there is no such text.
    """


class TextModel(Protocol):
    """All methods are pure and may run in any thread."""

    @property
    def facts(self) -> ModelFacts: ...

    def render_chat(self, chat: Chat, *, limit_s: float) -> RenderedChat:
        """Return the prompt, within ``limit_s``. Raises ChatTemplateError."""

    def encode_chat(self, chat: RenderedChat) -> tuple[int, ...]:
        """Tokenize a chat's prompt: only the template writes control tokens.

        Raises ChatTemplateError for text that the tokenizer cannot write as text.
        """

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokenize a bare prompt, in which special tokens count as what they are.

        ``add_special_tokens``: with what the tokenizer puts around a prompt.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of complete ids."""

    def token_bytes(self, token: int) -> bytes:
        """Return what one token stands for, special tokens as their names; b"" if unknown."""

    def special_text(self, token: int) -> str:
        """Return the name of a special token, and "" for all others."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...
