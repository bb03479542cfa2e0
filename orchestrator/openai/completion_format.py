"""Answers of /v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.openai.answer_format import AnswerHead, Usage, WholeChoice
from mlx_dp.orchestrator.openai.chunk_extras import ChunkExtras
from mlx_dp.orchestrator.openai.logprobs import LEGACY_LISTS, Logprobs, TokenBytes, legacy_logprobs
from mlx_dp.orchestrator.text.choice_text import Piece, ShownToken

_KIND: Final = "text_completion"
_encode: Final = msgspec.json.encode


class CompletionFormat:
    """As ChatFormat, in the older shape. ``echoes`` has the prompt's text for each choice."""

    def __init__(
        self,
        head: AnswerHead,
        token_bytes: TokenBytes,
        *,
        logprobs: int | None,
        extras: ChunkExtras,
        echoes: Sequence[str] = (),
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._num_top = logprobs
        self._echoes = tuple(echoes)
        self._start = head.event_start(_KIND)
        self._extras = extras

    def opening(self, index: int) -> bytes:
        prompt_ids = self._extras.prompt_token_ids(index)
        if not self._echoes and not prompt_ids:
            return b""
        echo = self._echoes[index] if self._echoes else ""
        members = prompt_ids + self._extras.token_ids()
        return self._chunk(index, echo, b"null", b"null", members, 0)

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes:
        logprobs = _encode(self.logprobs(piece.logprobs)) if piece.logprobs else b"null"
        ids = self._extras.token_ids(piece.ids)
        return self._chunk(index, piece.text, logprobs, b"null", ids, num_tokens)

    def closing(self, index: int, finish_reason: str, num_tokens: int) -> bytes:
        ids = self._extras.token_ids()
        return self._chunk(index, "", b"null", _encode(finish_reason), ids, num_tokens)

    def usage(self, usage: Usage) -> bytes:
        return self._start + b'[],"usage":' + _encode(usage.as_object()) + b"}\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes | bytearray]:
        yield self._head.body_start(_KIND)
        for index, choice in enumerate(choices):
            text = self._echoes[index] + choice.text if self._echoes else choice.text
            yield b'%b{"index":%d,"text":%b,"logprobs":' % (
                b"," if index else b"[",
                index,
                _encode(text),
            )
            if self._num_top is None:
                yield b"null"
            else:
                yield from choice.logprobs.parts(LEGACY_LISTS)
            yield b',"finish_reason":%b' % _encode(choice.finish_reason)
            yield self._extras.prompt_token_ids(index)
            yield self._extras.whole_token_ids(choice.token_ids)
            yield b"}"
        yield b'],"usage":%b}' % _encode(usage.as_object())

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
            self._extras.event_end(index, num_tokens),
        )

    def logprobs(self, tokens: Sequence[ShownToken]) -> Logprobs | None:
        if self._num_top is None:
            return None
        return legacy_logprobs(tokens, self._token_bytes, self._num_top)
