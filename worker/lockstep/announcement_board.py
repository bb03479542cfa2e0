"""Collects the announcements of the present pass and the next one."""

from mlx_dp.worker.lockstep.announcement import Announcement, ForeignFrameError, RankRows


class AnnouncementBoard:
    """Collects the peers' announcements of one generation, pass by pass.

    A peer enters the next pass once it has heard from all others. So it may be ahead by one pass,
    never by two: the board holds at most two announcements per rank.
    """

    def __init__(self, *, generation: int, rank: int, size: int) -> None:
        self._generation = generation
        self._peers = [peer for peer in range(size) if peer != rank]
        self._number = 0
        self._announced: dict[int, dict[int, RankRows]] = {peer: {} for peer in self._peers}

    @property
    def number(self) -> int:
        """The pass to agree on next."""
        return self._number

    @property
    def wanted(self) -> bool:
        """Whether a peer has entered this pass and waits."""
        return any(self._number in announced for announced in self._announced.values())

    @property
    def missing(self) -> list[int]:
        """The peers that have not announced this pass."""
        return [peer for peer in self._peers if self._number not in self._announced[peer]]

    def add(self, announcement: Announcement) -> None:
        """Add a peer's announcement. Raises ForeignFrameError if it does not belong to this pass or
        the next.
        """
        if announcement.generation != self._generation:
            raise ForeignFrameError(f"it is of generation {announcement.generation}")
        if announcement.rank not in self._announced:
            raise ForeignFrameError(f"it is of rank {announcement.rank}")
        announced = self._announced[announcement.rank]
        ahead = announcement.number - self._number
        if ahead not in (0, 1) or announcement.number in announced:
            raise ForeignFrameError(
                f"rank {announcement.rank} is at pass {announcement.number}, this one at "
                f"{self._number}"
            )
        announced[announcement.number] = announcement.rows

    def agree(self, rank: int, rows: RankRows) -> tuple[RankRows, ...]:
        """Go on to the next pass; return each rank's rows in this one."""
        assert not self.missing, f"pass {self._number}: no announcement of ranks {self.missing}"
        others = {peer: announced.pop(self._number) for peer, announced in self._announced.items()}
        self._number += 1
        return tuple(rows if r == rank else others[r] for r in range(len(others) + 1))
