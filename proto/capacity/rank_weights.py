"""The share of a model's weights that each rank of a group would hold."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.capacity.model_shape import Count
from mlx_dp.proto.capacity.parallel import MAX_OWNERS
from mlx_dp.proto.fields import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Bytes by rank, from shapes alone. ``refusal``: why the weights cannot be divided."""

    nbytes: Annotated[tuple[Count, ...], Meta(max_length=MAX_OWNERS)] = ()
    refusal: Text | None = None
