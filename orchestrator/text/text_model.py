"""The text side of a model, for the HTTP side: text to token ids, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlx_dp.orchestrator.text.detokenizer import Detokenizer
from mlx_dp.proto.messages.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model, from its files."""

    path: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    """Number of token ids of the tokenizer. The model's own table may be larger."""
    context_length: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """The model's defaults, from its generation_config.json."""
    follows_grammars: bool = True
    """Whether its engine supports grammars. The fake one does not."""


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""Values of ``role`` in a message that the API accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to render. ``arguments`` are passed to the template."""

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a chat, as rendered by the template."""

    text: str
    marked: str | None = None
    """The prompt with other characters where conversation text looks like control tokens.

    The control tokens that are left are the template's own. None if there is no such text.
    """


class TextModel(Protocol):
    """Templates and tokenizer of one model. All methods are pure and may run in any thread."""

    @property
    def facts(self) -> ModelFacts: ...

    def render_chat(self, chat: Chat, *, limit_s: float) -> RenderedChat:
        """Return the prompt, within ``limit_s``. Raises ChatTemplateError."""

    def encode_chat(self, chat: RenderedChat) -> tuple[int, ...]:
        """Tokenize a chat's prompt. Only the template's own control tokens become such.

        Raises ChatTemplateError for text that the tokenizer cannot encode as plain text.
        """

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokenize a bare prompt, in which special tokens are recognized.

        ``add_special_tokens``: add those that the tokenizer puts around a prompt.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of complete ids."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token: the name for a special token, b"" if unknown."""

    def special_text(self, token: int) -> str:
        """Return the name of a special token, or "" for other tokens."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...
