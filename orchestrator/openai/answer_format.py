"""How answers are written: the seam between the two generation routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from mlx_dp.orchestrator.text.choice_text import Piece, ShownToken

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_object(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """One finished answer."""

    text: str
    finish_reason: str
    logprobs: tuple[ShownToken, ...] = ()


class AnswerFormat(Protocol):
    """Renders one request's answers. The stream methods return whole server-sent events."""

    def opening(self, index: int) -> bytes:
        """Return what precedes the first piece of a choice."""

    def piece(self, index: int, piece: Piece) -> bytes: ...

    def closing(self, index: int, finish_reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""


def event_end(*, include_usage: bool) -> bytes:
    """Return what follows the value of ``choices`` in an event.

    With include_usage, OpenAI puts a null on every chunk but the last.
    """
    return b',"usage":null}\n\n' if include_usage else b"}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def event_start(self, kind: str) -> bytes:
        """Return the beginning of an event, up to the value of ``choices``."""
        return b"data: " + msgspec.json.encode(self.as_object(kind))[:-1] + b',"choices":'

    def as_object(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
