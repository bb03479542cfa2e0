"""The other ranks of a group, as the worker's loop and start see them. No arrays here."""

from typing import Protocol

from mlx_dp.proto.messages.events import PassTotals


class PassEndedError(Exception):
    """A pass failed, and this process ends. Neither the model nor a request is at fault."""


class RankLostError(PassEndedError):
    """Another rank of the group does not answer, or its connection broke.

    ``rank`` is None if the lost rank is unknown. The group cannot continue; this rank is not at
    fault.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PassWatch(Protocol):
    """Receives the progress of passes while they run."""

    def awaiting(self, rank: int) -> None:
        """Report that ``rank`` is late. Repeated while it is; an exception ends the wait."""

    def agreed(self, peer_tokens: int) -> None:
        """Report that a pass begins, in which the peers run ``peer_tokens`` tokens."""


class Peers(Protocol):
    """The other ranks of the group, as the loop sees them."""

    @property
    def fd(self) -> int:
        """Readable when a message may have arrived. Call ``poll_wanted`` before each wait."""

    def poll_wanted(self) -> bool:
        """Read messages; return whether a peer waits for this rank to take part in a pass."""

    def take_part(self) -> None:
        """Compute this rank's share of a pass in which it has no rows."""

    def watch(self, watch: PassWatch) -> None:
        """Report to this watch from now on; it replaces the previous one."""

    def close(self) -> None:
        """Close the ranks' sockets. No pass can begin any more."""

    @property
    def totals(self) -> PassTotals:
        """Counts of the passes since the last call of ``watch``."""
