"""Responses of /v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.formats.common.api_format import ChoiceEnd, ResponseContext, Usage
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.openai.fields import StreamOptions
from mlx_dp.orchestrator.formats.openai.logprobs import LEGACY_LOGPROBS
from mlx_dp.orchestrator.formats.openai.response_parts import (
    KEEP_ALIVE,
    ChunkMembers,
    ResponseHead,
    final_usage,
    prompt_token_ids,
    stream_end,
    stream_failure,
)
from mlx_dp.orchestrator.formats.openai.whole_writer import BodyShape, CollectedChoice
from mlx_dp.orchestrator.text.choice_text import Piece

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
        logprobs = _encode(LEGACY_LOGPROBS.shown(self._context, piece.logprobs))
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


def _body_parts(
    context: ResponseContext, head: ResponseHead, choices: Sequence[CollectedChoice], usage: Usage
) -> Iterator[bytes | bytearray]:
    """Yield the body. Each choice follows its prompt if the client asked for ``echo``."""
    yield head.body_start(_KIND)
    for index, choice in enumerate(choices):
        yield b'%b{"index":%d,"text":%b,"logprobs":' % (
            b"," if index else b"[",
            index,
            _encode((context.prompt_view(index).text or "") + choice.text),
        )
        yield from choice.logprob_parts()
        yield b',"finish_reason":%b' % _encode(choice.finish_reason)
        yield prompt_token_ids(context, index)
        yield choice.token_ids
        yield b"}"
    yield b'],"usage":%b}' % _encode(final_usage(usage))


COMPLETION_BODY: Final = BodyShape(
    id_prefix=_ID_PREFIX, logprobs=LEGACY_LOGPROBS, parts=_body_parts
)
