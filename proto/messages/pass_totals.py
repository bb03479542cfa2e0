"""Counters of a rank's forward passes."""

from dataclasses import dataclass

from mlx_dp.proto.capacity.model_shape import Count
from mlx_dp.proto.fields import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """Counts of one process since it began to serve.

    ``waited_s`` is the time that it waited for a peer to enter a pass; its device may still have
    run the previous pass meanwhile.
    """

    passes: Count
    idle_passes: Count
    """Passes in which it had no rows."""
    waited_s: Seconds
