"""Counters of a rank's forward passes."""

from dataclasses import dataclass

from mlx_dp.proto.capacity.model_shape import Count
from mlx_dp.proto.fields import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """Counts of one process since it began to serve.

    ``waited_s`` is the time that it was ready for a pass that a peer had not come to yet; its
    device may have had work of the pass before meanwhile.
    """

    passes: Count
    idle_passes: Count
    """Those of them in which it had no rows of its own."""
    waited_s: Seconds
