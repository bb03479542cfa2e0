"""Counts the passes of a rank."""

from mlx_dp.proto.messages.events import PassTotals


class PassCounter:
    """Sums up passes since ``restart``."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the counts: passes during start-up mostly wait for peers that still load."""
        self._passes = 0
        self._idle_passes = 0
        self._waited_s = 0.0

    def count(self, *, tokens: int, waited_s: float) -> None:
        """Count a pass in which this rank has ``tokens`` rows."""
        self._passes += 1
        self._idle_passes += tokens == 0
        self._waited_s += waited_s

    @property
    def totals(self) -> PassTotals:
        return PassTotals(
            passes=self._passes, idle_passes=self._idle_passes, waited_s=self._waited_s
        )
