"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mlx_dp.orchestrator.formats.common.api_format import ResponseContext
from mlx_dp.orchestrator.text.choice_text import ShownToken

TokenBytes = Callable[[int], bytes]
Logprobs = Mapping[str, Sequence[object]]
"""Lists of equal length, with an item for each token: both shapes consist of these."""


class EncodedLogprobs:
    """One choice's log-probabilities as JSON, which takes a tenth of the memory of the values."""

    def __init__(self) -> None:
        self._lists: dict[str, bytearray] = {}

    def extend(self, logprobs: Logprobs) -> None:
        """Append those of further tokens."""
        for name, items in logprobs.items():
            encoded = self._lists.setdefault(name, bytearray())
            if encoded:
                encoded += b","
            encoded += msgspec.json.encode(items)[1:-1]

    def parts(self, names: Sequence[str]) -> Iterator[bytes | bytearray]:
        """Yield the parts of one JSON object with everything that was appended."""
        for at, name in enumerate(names):
            yield b'%b"%b":[' % (b"," if at else b"{", name.encode())
            yield self._lists.get(name, b"")
            yield b"]"
        yield b"}"


def _chat_logprobs(tokens: Sequence[ShownToken], token_bytes: TokenBytes, num_top: int) -> Logprobs:
    """The shape of chat completions."""
    return {
        "content": [
            {
                **_entry(token_bytes(shown.token), shown.logprob.logprob),
                "top_logprobs": [
                    _entry(token_bytes(token), logprob)
                    for token, logprob in shown.logprob.top[:num_top]
                ],
            }
            for shown in tokens
        ]
    }


def _entry(data: bytes, logprob: float) -> dict[str, object]:
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _legacy_logprobs(
    tokens: Sequence[ShownToken], token_bytes: TokenBytes, num_top: int
) -> Logprobs:
    """The shape of completions. Of tokens with equal text the most likely one stays."""

    def name(token: int) -> str:
        return token_bytes(token).decode(errors="replace")

    tops: list[dict[str, float]] = []
    for shown in tokens:
        top: dict[str, float] = {}
        for token, logprob in shown.logprob.top[:num_top]:
            top.setdefault(name(token), logprob)
        # The chosen token is always included, so there may be one more than the client asked for.
        top.setdefault(name(shown.token), shown.logprob.logprob)
        tops.append(top)
    return {
        "tokens": [name(shown.token) for shown in tokens],
        "token_logprobs": [shown.logprob.logprob for shown in tokens],
        "top_logprobs": tops,
        "text_offset": [shown.text_offset for shown in tokens],
    }


@dataclass(frozen=True, slots=True)
class LogprobShape:
    """One of the two shapes: the names of its lists, and the function that fills them."""

    lists: Sequence[str]
    fill: Callable[[Sequence[ShownToken], TokenBytes, int], Logprobs]

    def shown(self, context: ResponseContext, tokens: Sequence[ShownToken]) -> Logprobs | None:
        """Return the log-probabilities of some tokens, or None if there are none to show."""
        num_top = context.generation.num_logprobs
        if num_top is None or not tokens:
            return None
        return self.fill(tokens, context.token_bytes, num_top)


CHAT_LOGPROBS: Final = LogprobShape(("content",), _chat_logprobs)
LEGACY_LOGPROBS: Final = LogprobShape(
    ("tokens", "token_logprobs", "top_logprobs", "text_offset"), _legacy_logprobs
)
