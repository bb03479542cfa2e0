"""What capacity arithmetic needs to know of a model."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.errors import ConfigError

Count = Annotated[int, Meta(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one model, as one process holds it.

    ``kv_bytes_per_token`` is summed over the attention layers (keys and values, in the dtype that
    the cache has); ``auxiliary_bytes_per_slot`` is the recurrent state of one request, which does
    not grow with its length.
    """

    num_layers: Count
    attention_layers: Count
    auxiliary_layers: Count
    kv_bytes_per_token: Count
    auxiliary_bytes_per_slot: Count
    vocab_size: Annotated[int, Meta(ge=1, lt=2**31)]
    context_length: Annotated[int, Meta(ge=1, lt=2**31)]
    weights_nbytes: Count

    @property
    def hybrid(self) -> bool:
        """Some layers hold auxiliary state, so that requests need auxiliary slots."""
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
