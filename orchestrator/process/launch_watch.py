"""Whether a launched host has been lost without a word: time and facts in, a verdict out."""

from collections.abc import Set
from dataclasses import dataclass, field


@dataclass(slots=True)
class LaunchWatch:
    """One run of the launcher: a rank that had joined must not stay away.

    A cable that is cut ends the host, but neither ssh nor the launcher learns of it.
    """

    ranks: Set[int]
    patience_s: float
    _joined: set[int] = field(default_factory=set)
    _missing_since: dict[int, float] = field(default_factory=dict)

    def look(self, present: Set[int], now: float) -> int | None:
        """Take in which ranks have a host; return one that has been away for too long."""
        self._joined |= present
        for rank in sorted(self.ranks):
            if rank in present or rank not in self._joined:
                self._missing_since.pop(rank, None)
            elif now - self._missing_since.setdefault(rank, now) > self.patience_s:
                return rank
        return None
