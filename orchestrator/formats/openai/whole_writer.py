"""One choice of a response that is not streamed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlx_dp.orchestrator.formats.common.api_format import EncodedIds
from mlx_dp.orchestrator.formats.openai.logprobs import EncodedLogprobs, Logprobs
from mlx_dp.orchestrator.text.choice_text import Piece


@dataclass(slots=True)
class CollectedChoice:
    """Collects the pieces, log-probabilities and ids as the JSON that will be sent."""

    logprobs: EncodedLogprobs = field(default_factory=EncodedLogprobs)
    finish_reason: str = ""
    _texts: list[str] = field(default_factory=list)
    _ids: EncodedIds = field(default_factory=EncodedIds)

    def append(self, piece: Piece, logprobs: Logprobs | None) -> None:
        self._texts.append(piece.text)
        self._ids.extend(piece.ids)
        if logprobs is not None:
            self.logprobs.extend(logprobs)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def token_ids(self, *, shown: bool) -> bytes:
        """Return the member with the ids, with the comma before it."""
        return b',"token_ids":' + self._ids.array if shown else b""

    def logprob_parts(self, lists: Sequence[str] | None) -> Iterator[bytes | bytearray]:
        """Yield the value of ``logprobs``, null if there are no lists to show."""
        if lists is None:
            yield b"null"
        else:
            yield from self.logprobs.parts(lists)
