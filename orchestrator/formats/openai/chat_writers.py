"""Responses of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.formats.common.api_format import ChoiceEnd, ResponseContext, Usage
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.openai.fields import StreamOptions
from mlx_dp.orchestrator.formats.openai.logprobs import CHAT_LOGPROBS
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

_ID_PREFIX: Final = "chatcmpl"
_RUNNING: Final = b'},"logprobs":null,"finish_reason":null'
_encode: Final = msgspec.json.encode


class ChatStreamWriter:
    """Joins chunks from parts that are made once: only the delta is encoded for each."""

    def __init__(self, context: ResponseContext, options: StreamOptions) -> None:
        self._context = context
        self._members = ChunkMembers(context, options)
        self._include_usage = bool(options.include_usage)
        head = ResponseHead.new(_ID_PREFIX, context.model)
        self._start = head.event_start("chat.completion.chunk")
        constant = self._members.constant
        self._plain_end = _RUNNING + b"}]" + self._members.event_end(0, 0) if constant else None

    def start(self) -> bytes:
        return b""

    def opening(self, index: int) -> bytes:
        members = self._members
        return b'%b[{"index":%d,"delta":{"role":"assistant","content":""%b%b}]%b%b' % (
            self._start,
            index,
            _RUNNING,
            members.token_ids(),
            members.prompt_token_ids(index),
            members.event_end(index, 0),
        )

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes:
        start = b'%b[{"index":%d,"delta":{"content":%b' % (self._start, index, _encode(piece.text))
        if self._plain_end is not None and not piece.logprobs:
            # Nearly all chunks.
            return start + self._plain_end
        return b"%b%b%b}]%b" % (
            start,
            self._running(piece),
            self._members.token_ids(piece.ids),
            self._members.event_end(index, num_tokens),
        )

    def _running(self, piece: Piece) -> bytes:
        """Return what follows the delta's members in a chunk that is not the last."""
        if not piece.logprobs:
            return _RUNNING
        logprobs = _encode(CHAT_LOGPROBS.shown(self._context, piece.logprobs))
        return b'},"logprobs":%b,"finish_reason":null' % logprobs

    def closing(self, index: int, end: ChoiceEnd) -> bytes:
        return b'%b[{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b%b}]%b' % (
            self._start,
            index,
            _encode(end.reason.value),
            self._members.token_ids(),
            self._members.event_end(index, end.num_tokens),
        )

    def end(self, usage: Usage) -> bytes:
        return stream_end(self._start, usage, include_usage=self._include_usage)

    def failure(self, error: ApiError) -> bytes:
        return stream_failure(error)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE


def _body_parts(
    context: ResponseContext, head: ResponseHead, choices: Sequence[CollectedChoice], usage: Usage
) -> Iterator[bytes | bytearray]:
    yield head.body_start("chat.completion")
    for index, choice in enumerate(choices):
        yield b'%b{"index":%d,"message":{"role":"assistant","content":%b},"logprobs":' % (
            b"," if index else b"[",
            index,
            _encode(choice.text),
        )
        yield from choice.logprob_parts()
        yield b',"finish_reason":%b' % _encode(choice.finish_reason)
        yield choice.token_ids
        yield b"}"
    yield b"]"
    # All choices have the one prompt.
    yield prompt_token_ids(context, 0)
    yield b',"usage":%b}' % _encode(final_usage(usage))


CHAT_BODY: Final = BodyShape(id_prefix=_ID_PREFIX, logprobs=CHAT_LOGPROBS, parts=_body_parts)
