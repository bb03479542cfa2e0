"""How the rows of all ranks meet in one pass: a pure function of how many each has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """The rows of one pass, as one rank sees them.

    Two ways lead to the rows of all ranks. ``summed``: each lays its own rows among zeros where
    they belong, and the sum is what all have. Else each pads to the ``widest`` and all are
    gathered, and the padding is cut away. On a ring of N the sum moves 2 (N - 1) / N times all
    rows, the gather N - 1 times the widest.
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
        """Where one's own rows begin among all."""
        return sum(self.counts[: self.rank])

    @property
    def widest(self) -> int:
        return max(self.counts)

    @property
    def summed(self) -> bool:
        return 2 * self.total < len(self.counts) * self.widest

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The places of the real rows among the gathered ones; () when all are real."""
        if self.total == len(self.counts) * self.widest:
            return ()
        starts = range(0, len(self.counts) * self.widest, self.widest)
        return tuple(
            (start, start + count)
            for start, count in zip(starts, self.counts, strict=True)
            if count
        )
