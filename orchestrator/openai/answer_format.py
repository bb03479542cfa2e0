"""How answers are written: the seam between the two generation routes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from mlx_dp.orchestrator.openai.logprobs import EncodedLogprobs, Logprobs
from mlx_dp.orchestrator.openai.token_ids import EncodedIds
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
            **usage_so_far(self.prompt_tokens, self.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """Return the counts that are known while an answer runs."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """One finished answer."""

    text: str
    finish_reason: str
    logprobs: EncodedLogprobs = field(default_factory=EncodedLogprobs)
    token_ids: EncodedIds = field(default_factory=EncodedIds)


class AnswerFormat(Protocol):
    """Renders one request's answers. The stream methods return whole server-sent events.

    ``num_tokens`` counts the choice's tokens so far.
    """

    def opening(self, index: int) -> bytes:
        """Return what precedes the first piece of a choice."""

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes: ...

    def closing(self, index: int, finish_reason: str, num_tokens: int) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def logprobs(self, tokens: Sequence[ShownToken]) -> Logprobs | None:
        """Return what an answer shows of these tokens; None: nothing was asked for."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes | bytearray]:
        """Yield the body of an answer that is not streamed, in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def event_start(self, kind: str) -> bytes:
        """Return the beginning of an event, up to the value of ``choices``."""
        return b"data: " + self.body_start(kind)

    def body_start(self, kind: str) -> bytes:
        """The same of a body that is not streamed."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return msgspec.json.encode(head)[:-1] + b',"choices":'
