"""The sizes of a model that capacity arithmetic needs, and the weights of each rank."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.capacity.parallel import MAX_OWNERS
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.fields import Text

Count = Annotated[int, Meta(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWindow:
    """Layers that keep the last ``tokens`` tokens only, and the bytes of each of those tokens."""

    tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    bytes_per_token: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one model, as one process holds it.

    ``kv_bytes_per_token`` is summed over the attention layers that keep every token (keys and
    values, in the dtype that the cache has), and ``windows`` are the others, one entry a width;
    ``auxiliary_bytes_per_slot`` is the recurrent state of one request, which does not grow with
    its length.
    """

    num_layers: Count
    attention_layers: Count
    auxiliary_layers: Count
    kv_bytes_per_token: Count
    auxiliary_bytes_per_slot: Count
    vocab_size: Annotated[int, Meta(ge=1, lt=2**31)]
    context_length: Annotated[int, Meta(ge=1, lt=2**31)]
    weights_nbytes: Count
    windows: Annotated[tuple[CacheWindow, ...], Meta(max_length=64)] = ()

    def kv_nbytes(self, num_tokens: int) -> int:
        """Return the bytes of KV of a request of ``num_tokens`` tokens."""
        windowed = sum(min(num_tokens, w.tokens) * w.bytes_per_token for w in self.windows)
        return num_tokens * self.kv_bytes_per_token + windowed

    def request_nbytes(self, num_tokens: int) -> int:
        """Return the bytes of KV and state of a request of ``num_tokens`` tokens."""
        return self.kv_nbytes(num_tokens) + self.auxiliary_bytes_per_slot

    def longest_request(self, nbytes: int) -> int | None:
        """Return the length of the longest request whose KV fits into ``nbytes``; None: any."""
        tokens = 0
        per_token = self.kv_bytes_per_token + sum(w.bytes_per_token for w in self.windows)
        for window in sorted(self.windows, key=lambda window: window.tokens):
            filling = (window.tokens - tokens) * per_token
            if filling > nbytes:
                return tokens + nbytes // per_token
            nbytes -= filling
            tokens = window.tokens
            per_token -= window.bytes_per_token
        return tokens + nbytes // per_token if per_token else None

    @property
    def has_kv(self) -> bool:
        """Whether some layers hold KV, so that longer requests take more."""
        return self.kv_bytes_per_token > 0 or any(w.bytes_per_token for w in self.windows)

    @property
    def hybrid(self) -> bool:
        """Whether some layers hold auxiliary state, so that requests need auxiliary slots."""
        return self.auxiliary_layers > 0


def resolve_context_length(asked: int | None, of_model: int) -> int:
    """Return the context length of requests. Raises ConfigError beyond the model's own."""
    if asked is None:
        return of_model
    if asked > of_model:
        raise ConfigError(
            f"--context-length {asked} exceeds the model's {of_model}: use at most that, or omit "
            "the flag"
        )
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Bytes by rank, from shapes alone. ``refusal``: why the weights cannot be divided."""

    nbytes: Annotated[tuple[Count, ...], Meta(max_length=MAX_OWNERS)] = ()
    refusal: Text | None = None
