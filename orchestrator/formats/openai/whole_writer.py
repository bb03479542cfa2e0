"""Responses that are not streamed: collected choice by choice, then written as one body."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_dp.orchestrator.formats.common.api_format import (
    ChoiceEnd,
    EncodedIds,
    ResponseContext,
    Usage,
)
from mlx_dp.orchestrator.formats.openai.logprobs import EncodedLogprobs, Logprobs, LogprobShape
from mlx_dp.orchestrator.formats.openai.response_parts import ResponseHead
from mlx_dp.orchestrator.text.choice_text import Piece


@dataclass(slots=True, kw_only=True)
class CollectedChoice:
    """Collects pieces, log-probabilities and ids of one choice as the JSON that will be sent."""

    logprob_lists: Sequence[str] | None
    """The lists in ``logprobs``, or None if the client did not ask for any."""
    shows_ids: bool
    finish_reason: str = ""
    _logprobs: EncodedLogprobs = field(default_factory=EncodedLogprobs)
    _texts: list[str] = field(default_factory=list)
    _ids: EncodedIds = field(default_factory=EncodedIds)

    def append(self, piece: Piece, logprobs: Logprobs | None) -> None:
        self._texts.append(piece.text)
        self._ids.extend(piece.ids)
        if logprobs is not None:
            self._logprobs.extend(logprobs)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def token_ids(self) -> bytes:
        """The member with the ids and the comma before it, or b"" if they are not shown."""
        return b',"token_ids":' + self._ids.array if self.shows_ids else b""

    def logprob_parts(self) -> Iterator[bytes | bytearray]:
        """Yield the value of ``logprobs``, null if there are no lists to show."""
        if self.logprob_lists is None:
            yield b"null"
        else:
            yield from self._logprobs.parts(self.logprob_lists)


BodyParts = Callable[
    [ResponseContext, ResponseHead, Sequence[CollectedChoice], Usage],
    Iterator[bytes | bytearray],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyShape:
    """The differences between the bodies of chat and text completions."""

    id_prefix: str
    logprobs: LogprobShape
    parts: BodyParts
    """Yields the body, once every choice is closed."""


class WholeBodyWriter:
    """A ``WholeWriter`` of all choices. The response's id and time are those of its beginning."""

    def __init__(self, context: ResponseContext, shape: BodyShape) -> None:
        self._context = context
        self._shape = shape
        self._head = ResponseHead.new(shape.id_prefix, context.model)
        generation = context.generation
        lists = None if generation.num_logprobs is None else shape.logprobs.lists
        self._choices = [
            CollectedChoice(logprob_lists=lists, shows_ids=generation.shows_token_ids)
            for _ in range(context.num_choices)
        ]

    def piece(self, index: int, piece: Piece) -> None:
        logprobs = self._shape.logprobs.shown(self._context, piece.logprobs)
        self._choices[index].append(piece, logprobs)

    def closing(self, index: int, end: ChoiceEnd) -> None:
        self._choices[index].finish_reason = end.reason.value

    def body(self, usage: Usage) -> Iterator[bytes | bytearray]:
        for index, choice in enumerate(self._choices):
            assert choice.finish_reason, index
        return self._shape.parts(self._context, self._head, self._choices, usage)
