"""Where answers go: into a stream of events, or into one body."""

from collections.abc import Sequence

from mlx_dp.orchestrator.http.exchange import Exchange
from mlx_dp.orchestrator.http.sse import EventStream
from mlx_dp.orchestrator.openai.answer_format import AnswerFormat, WholeChoice
from mlx_dp.orchestrator.openai.logprobs import EncodedLogprobs
from mlx_dp.orchestrator.openai.token_ids import EncodedIds
from mlx_dp.orchestrator.text.choice_text import Piece


def rank_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Name the owners that serve, and why they do, as far as they are known."""
    grants = exchange.grants
    if not grants:
        return []
    owners = ",".join(dict.fromkeys(str(grant.owner) for grant in grants))
    reasons = ",".join(dict.fromkeys(grant.reason for grant in grants))
    return [(b"x-dp-rank", owners.encode()), (b"x-routing-reason", reasons.encode())]


def rank_comment(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The rank headers as a comment on one line, for a stream whose headers are sent."""
    return b": " + b" ".join(name + b": " + value for name, value in headers) + b"\n\n"


class StreamSink:
    """Writes each piece as an event, behind the opening of its choice.

    The headers leave at the grant and do not wait for the first token: a proxy that gets both at
    once writes them one after the other, and the second write waits for the acknowledgement of the
    first, 40 ms. A comment names the owners where the headers could not, or no longer do.
    """

    def __init__(self, stream: EventStream, answers: AnswerFormat, exchange: Exchange) -> None:
        self._stream = stream
        self._format = answers
        self._exchange = exchange
        self._opened: set[int] = set()
        self._named: list[tuple[bytes, bytes]] = []

    async def granted(self) -> None:
        serving = rank_headers(self._exchange)
        if not self._stream.started:
            self._stream.headers = self._named = serving
            # With several choices the headers name the owners of all, if those are known in time.
            if self._exchange.all_granted:
                await self._stream.start()
        elif serving != self._named:
            self._named = serving
            await self._stream.write(rank_comment(serving))

    async def piece(self, index: int, piece: Piece) -> None:
        num_tokens = self._exchange.completion_tokens(index)
        event = self._format.piece(index, piece, num_tokens)
        await self._stream.write(self._opening(index) + event)

    async def close(self, index: int, piece: Piece, finish_reason: str) -> None:
        num_tokens = self._exchange.completion_tokens(index)
        events = self._opening(index)
        if piece:
            events += self._format.piece(index, piece, num_tokens)
        await self._stream.write(events + self._format.closing(index, finish_reason, num_tokens))

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._format.opening(index)


class CollectSink:
    """Keeps everything until the end, log-probabilities as they will be sent."""

    def __init__(self, num_choices: int, answers: AnswerFormat) -> None:
        self._format = answers
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs = [EncodedLogprobs() for _ in range(num_choices)]
        self._ids = [EncodedIds() for _ in range(num_choices)]
        self._reasons = [""] * num_choices

    async def granted(self) -> None:
        """Nothing is sent before the end."""

    async def piece(self, index: int, piece: Piece) -> None:
        self._texts[index].append(piece.text)
        self._ids[index].extend(piece.ids)
        if piece.logprobs and (logprobs := self._format.logprobs(piece.logprobs)) is not None:
            self._logprobs[index].extend(logprobs)

    async def close(self, index: int, piece: Piece, finish_reason: str) -> None:
        await self.piece(index, piece)
        self._reasons[index] = finish_reason

    def choices(self) -> list[WholeChoice]:
        assert all(self._reasons), self._reasons
        return [
            WholeChoice(
                text="".join(texts), finish_reason=reason, logprobs=logprobs, token_ids=token_ids
            )
            for texts, logprobs, token_ids, reason in zip(
                self._texts, self._logprobs, self._ids, self._reasons, strict=True
            )
        ]
