"""Counters of a rank's forward passes."""

from dataclasses import dataclass

from mlx_dp.proto.fields import Seconds
from mlx_dp.proto.model_shape import Count


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
