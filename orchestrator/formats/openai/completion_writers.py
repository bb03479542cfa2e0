"""Responses of /v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.formats.common.api_format import ChoiceEnd, ResponseContext, Usage
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.openai.collected_choice import CollectedChoice
from mlx_dp.orchestrator.formats.openai.fields import StreamOptions
from mlx_dp.orchestrator.formats.openai.logprobs import LEGACY_LISTS, Logprobs, legacy_logprobs
from mlx_dp.orchestrator.formats.openai.response_parts import (
    KEEP_ALIVE,
    ChunkMembers,
    ResponseHead,
    final_usage,
    prompt_token_ids,
    stream_end,
    stream_failure,
)
from mlx_dp.orchestrator.text.choice_text import Piece, ShownToken

_ID_PREFIX: Final = "cmpl"
_KIND: Final = "text_completion"
_encode: Final = msgspec.json.encode


class CompletionStreamWriter:
    """Writes the chunks of the older shape. With ``echo`` the first one has the prompt's text."""

    def __init__(self, context: ResponseContext, options: StreamOptions) -> None:
        self._context = context
        self._members = ChunkMembers(context, options)
        self._include_usage = bool(options.include_usage)
        self._start = ResponseHead.new(_ID_PREFIX, context.model).event_start(_KIND)

    def start(self) -> bytes:
        return b""

    def opening(self, index: int) -> bytes:
        prompt_ids = self._members.prompt_token_ids(index)
        echo = self._context.prompt_view(index).text
        if echo is None and not prompt_ids:
            return b""
        members = prompt_ids + self._members.token_ids()
        return self._chunk(index, echo or "", b"null", b"null", members, 0)

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes:
        logprobs = _encode(_logprobs(self._context, piece.logprobs))
        ids = self._members.token_ids(piece.ids)
        return self._chunk(index, piece.text, logprobs, b"null", ids, num_tokens)

    def closing(self, index: int, end: ChoiceEnd) -> bytes:
        reason = _encode(end.reason.value)
        return self._chunk(index, "", b"null", reason, self._members.token_ids(), end.num_tokens)

    def end(self, usage: Usage) -> bytes:
        return stream_end(self._start, usage, include_usage=self._include_usage)

    def failure(self, error: ApiError) -> bytes:
        return stream_failure(error)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: bytes,
        finish_reason: bytes,
        members: bytes,
        num_tokens: int,
    ) -> bytes:
        return b'%b[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._start,
            index,
            _encode(text),
            logprobs,
            finish_reason,
            members,
            self._members.event_end(index, num_tokens),
        )


class CompletionWholeWriter:
    """Writes one body of all choices, each behind its prompt if the client asked for ``echo``."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._head = ResponseHead.new(_ID_PREFIX, context.model)
        self._choices = [CollectedChoice() for _ in range(context.num_choices)]

    def piece(self, index: int, piece: Piece) -> None:
        self._choices[index].append(piece, _logprobs(self._context, piece.logprobs))

    def closing(self, index: int, end: ChoiceEnd) -> None:
        self._choices[index].finish_reason = end.reason.value

    def body(self, usage: Usage) -> Iterator[bytes | bytearray]:
        generation = self._context.generation
        lists = None if generation.num_logprobs is None else LEGACY_LISTS
        yield self._head.body_start(_KIND)
        for index, choice in enumerate(self._choices):
            assert choice.finish_reason, index
            yield b'%b{"index":%d,"text":%b,"logprobs":' % (
                b"," if index else b"[",
                index,
                _encode((self._context.prompt_view(index).text or "") + choice.text),
            )
            yield from choice.logprob_parts(lists)
            yield b',"finish_reason":%b' % _encode(choice.finish_reason)
            yield prompt_token_ids(self._context, index)
            yield choice.token_ids(shown=generation.shows_token_ids)
            yield b"}"
        yield b'],"usage":%b}' % _encode(final_usage(usage))


def _logprobs(context: ResponseContext, tokens: Sequence[ShownToken]) -> Logprobs | None:
    num_top = context.generation.num_logprobs
    if num_top is None or not tokens:
        return None
    return legacy_logprobs(tokens, context.token_bytes, num_top)
