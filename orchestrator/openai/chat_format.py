"""Answers of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.openai.answer_format import AnswerHead, Usage, WholeChoice, event_end
from mlx_dp.orchestrator.openai.logprobs import CHAT_LISTS, Logprobs, TokenBytes, chat_logprobs
from mlx_dp.orchestrator.text.choice_text import Piece, ShownToken

_CHUNK: Final = "chat.completion.chunk"
_encode: Final = msgspec.json.encode


class ChatFormat:
    """Chunks are joined from parts made once; only the delta is encoded for each."""

    def __init__(
        self,
        head: AnswerHead,
        token_bytes: TokenBytes,
        *,
        logprobs: int | None,
        include_usage: bool,
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._num_top = logprobs
        self._start = head.event_start(_CHUNK)
        self._end = event_end(include_usage=include_usage)
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]' + self._end

    def opening(self, index: int) -> bytes:
        return b'%b[{"index":%d,"delta":{"role":"assistant","content":""%b' % (
            self._start,
            index,
            self._plain_end,
        )

    def piece(self, index: int, piece: Piece) -> bytes:
        start = b'%b[{"index":%d,"delta":{"content":%b' % (self._start, index, _encode(piece.text))
        if not piece.logprobs:
            return start + self._plain_end
        logprobs = _encode(self.logprobs(piece.logprobs))
        return b'%b},"logprobs":%b,"finish_reason":null}]%b' % (start, logprobs, self._end)

    def closing(self, index: int, finish_reason: str) -> bytes:
        return b'%b[{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}]%b' % (
            self._start,
            index,
            _encode(finish_reason),
            self._end,
        )

    def usage(self, usage: Usage) -> bytes:
        return self._start + b'[],"usage":' + _encode(usage.as_object()) + b"}\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes | bytearray]:
        yield self._head.body_start("chat.completion")
        for index, choice in enumerate(choices):
            yield b'%b{"index":%d,"message":{"role":"assistant","content":%b},"logprobs":' % (
                b"," if index else b"[",
                index,
                _encode(choice.text),
            )
            if self._num_top is None:
                yield b"null"
            else:
                yield from choice.logprobs.parts(CHAT_LISTS)
            yield b',"finish_reason":%b}' % _encode(choice.finish_reason)
        yield b'],"usage":%b}' % _encode(usage.as_object())

    def logprobs(self, tokens: Sequence[ShownToken]) -> Logprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(tokens, self._token_bytes, self._num_top)
