"""The ranks that have announced the present pass, and those that are ahead by one."""

from mlx_dp.worker.lockstep.announcement import Announcement, ForeignFrameError, RankRows


class AnnouncementBoard:
    """Collects the peers' announcements of one generation, pass by pass.

    A peer goes on to the next pass once it has heard all others, so it may be ahead by one pass
    and never by two: the board holds two numbers a rank at most.
    """

    def __init__(self, *, generation: int, rank: int, size: int) -> None:
        self._generation = generation
        self._peers = [peer for peer in range(size) if peer != rank]
        self._number = 0
        self._told: dict[int, dict[int, RankRows]] = {peer: {} for peer in self._peers}

    @property
    def number(self) -> int:
        """The pass to agree on next."""
        return self._number

    @property
    def wanted(self) -> bool:
        """Some peer is at this pass already, and waits."""
        return any(self._number in told for told in self._told.values())

    @property
    def missing(self) -> list[int]:
        """The peers that have not announced this pass."""
        return [peer for peer in self._peers if self._number not in self._told[peer]]

    def note(self, announcement: Announcement) -> None:
        """Note a peer's announcement. Raises ForeignFrameError for one of another time."""
        if announcement.generation != self._generation:
            raise ForeignFrameError(f"it is of generation {announcement.generation}")
        if announcement.rank not in self._told:
            raise ForeignFrameError(f"it is of rank {announcement.rank}")
        told = self._told[announcement.rank]
        ahead = announcement.number - self._number
        if ahead not in (0, 1) or announcement.number in told:
            raise ForeignFrameError(
                f"rank {announcement.rank} is at pass {announcement.number}, this one at "
                f"{self._number}"
            )
        told[announcement.number] = announcement.rows

    def agree(self, rank: int, rows: RankRows) -> tuple[RankRows, ...]:
        """Go on to the next pass; return each rank's rows in this one."""
        assert not self.missing, f"pass {self._number}: nothing of {self.missing}"
        others = {peer: told.pop(self._number) for peer, told in self._told.items()}
        self._number += 1
        return tuple(rows if r == rank else others[r] for r in range(len(others) + 1))
