"""The exchange of all ranks' rows in one pass, computed from the number of rows of each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """The rows of one pass, as one rank sees them.

    There are two ways to exchange rows. ``summed``: each rank places its own rows among zeros, and
    the sum has all rows. Otherwise each rank pads to the ``widest``, all are gathered, and the
    padding is removed. On a ring of N the sum moves 2 (N - 1) / N times all rows, the gather N - 1
    times the widest.
    """

    counts: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        return self.counts[self.rank]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def offset(self) -> int:
        """The index of the first own row among all rows."""
        return sum(self.counts[: self.rank])

    @property
    def widest(self) -> int:
        return max(self.counts)

    @property
    def summed(self) -> bool:
        return 2 * self.total < len(self.counts) * self.widest

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The ranges of real rows among the gathered ones; () when there is no padding."""
        if self.total == len(self.counts) * self.widest:
            return ()
        starts = range(0, len(self.counts) * self.widest, self.widest)
        return tuple(
            (start, start + count)
            for start, count in zip(starts, self.counts, strict=True)
            if count
        )
