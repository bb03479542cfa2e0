"""New tokens of one request, with their log-probabilities."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.fields import MAX_REQUEST_TOKENS, Epoch, RequestId, TokenId, TokenIds
from mlx_dp.proto.messages.sampling_params import MAX_TOP_LOGPROBS, require_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a drawn token, and the best ``(token id, log-probability)`` pairs."""

    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()

    def __post_init__(self) -> None:
        require_finite(self.logprob, *(logprob for _, logprob in self.top))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request; ``index`` is the answer position of the first of them."""

    request_id: RequestId
    epoch: Epoch
    index: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    ids: Annotated[TokenIds, Meta(min_length=1)]
    logprobs: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_REQUEST_TOKENS)] = ()
    """One per id if the request asked for them, else empty."""

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} tokens with {len(self.logprobs)} log-probabilities")
