"""Answers of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.openai.answer_format import AnswerHead, Usage, WholeChoice
from mlx_dp.orchestrator.openai.chunk_extras import ChunkExtras
from mlx_dp.orchestrator.openai.logprobs import CHAT_LISTS, Logprobs, TokenBytes, chat_logprobs
from mlx_dp.orchestrator.text.choice_text import Piece, ShownToken

_CHUNK: Final = "chat.completion.chunk"
_RUNNING: Final = b'},"logprobs":null,"finish_reason":null'
_encode: Final = msgspec.json.encode


class ChatFormat:
    """Chunks are joined from parts made once; only the delta is encoded for each."""

    def __init__(
        self,
        head: AnswerHead,
        token_bytes: TokenBytes,
        *,
        logprobs: int | None,
        extras: ChunkExtras,
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._num_top = logprobs
        self._extras = extras
        self._start = head.event_start(_CHUNK)
        plain_end = _RUNNING + b"}]" + extras.event_end(0, 0) if extras.constant else None
        self._plain_end = plain_end

    def opening(self, index: int) -> bytes:
        extras = self._extras
        return b'%b[{"index":%d,"delta":{"role":"assistant","content":""%b%b}]%b%b' % (
            self._start,
            index,
            _RUNNING,
            extras.token_ids(),
            extras.prompt_token_ids(index),
            extras.event_end(index, 0),
        )

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes:
        start = b'%b[{"index":%d,"delta":{"content":%b' % (self._start, index, _encode(piece.text))
        if self._plain_end is not None and not piece.logprobs:
            # Nearly all chunks there are.
            return start + self._plain_end
        return b"%b%b%b}]%b" % (
            start,
            self._running(piece),
            self._extras.token_ids(piece.ids),
            self._extras.event_end(index, num_tokens),
        )

    def _running(self, piece: Piece) -> bytes:
        """Return what follows the delta's members in a chunk that is not the last."""
        if not piece.logprobs:
            return _RUNNING
        logprobs = _encode(self.logprobs(piece.logprobs))
        return b'},"logprobs":%b,"finish_reason":null' % logprobs

    def closing(self, index: int, finish_reason: str, num_tokens: int) -> bytes:
        return b'%b[{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b%b}]%b' % (
            self._start,
            index,
            _encode(finish_reason),
            self._extras.token_ids(),
            self._extras.event_end(index, num_tokens),
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
            yield b',"finish_reason":%b' % _encode(choice.finish_reason)
            yield self._extras.whole_token_ids(choice.token_ids)
            yield b"}"
        yield b"]"
        # All choices have the one prompt.
        yield self._extras.prompt_token_ids(0)
        yield b',"usage":%b}' % _encode(usage.as_object())

    def logprobs(self, tokens: Sequence[ShownToken]) -> Logprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(tokens, self._token_bytes, self._num_top)
