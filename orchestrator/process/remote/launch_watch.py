"""Detects launched hosts that were lost without notice. Pure: time is an argument."""

from collections.abc import Set
from dataclasses import dataclass, field


@dataclass(slots=True)
class LaunchWatch:
    """Watches the hosts of one run of the launcher: a rank that joined must stay present.

    When a cable is cut the host gives up, but neither ssh nor the launcher notices.
    """

    ranks: Set[int]
    patience_s: float
    _joined: set[int] = field(default_factory=set)
    _missing_since: dict[int, float] = field(default_factory=dict)

    def update(self, present: Set[int], now: float) -> int | None:
        """Note the ranks that have a host; return one that was absent for too long, if any."""
        self._joined |= present
        for rank in sorted(self.ranks):
            if rank in present or rank not in self._joined:
                self._missing_since.pop(rank, None)
            elif now - self._missing_since.setdefault(rank, now) > self.patience_s:
                return rank
        return None
