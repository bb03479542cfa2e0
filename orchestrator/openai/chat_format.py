"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Final

import msgspec

from mlx_dp.orchestrator.openai.answer_format import AnswerHead, Usage, WholeChoice, event_end
from mlx_dp.orchestrator.openai.logprobs import TokenBytes, chat_logprobs
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
        logprobs = _encode(self._logprobs(piece.logprobs))
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

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        return _encode(
            {
                **self._head.as_object("chat.completion"),
                "choices": [
                    {
                        "index": index,
                        "message": {"role": "assistant", "content": choice.text},
                        "logprobs": self._logprobs(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage.as_object(),
            }
        )

    def _logprobs(self, tokens: tuple[ShownToken, ...]) -> dict[str, object] | None:
        if self._num_top is None:
            return None
        return chat_logprobs(tokens, self._token_bytes, self._num_top)
