"""The other ranks of a group, as the worker's loop and start see them. No arrays here."""

from typing import Protocol

from mlx_dp.proto.messages.pass_totals import PassTotals


class PassEndedError(Exception):
    """A pass came to nothing, and this process ends. It says nothing about model or request."""


class RankLostError(PassEndedError):
    """Another rank of the group does not answer, or its connection broke.

    ``rank`` is None where it is not known which. The group cannot go on; this rank did no wrong.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PassWatch(Protocol):
    """Is told how passes fare, in the middle of them."""

    def awaiting(self, rank: int) -> None:
        """This rank is late. Called repeatedly while it is; an exception ends the wait."""

    def agreed(self, peer_tokens: int) -> None:
        """A pass begins, in which the peers run so many tokens."""


class Peers(Protocol):
    """The other ranks, as the loop sees them while it has nothing to run itself."""

    @property
    def fd(self) -> int:
        """Becomes readable when there may be news; ``wanted`` has to be asked before each wait."""

    def wanted(self) -> bool:
        """A peer waits for this rank to take part in a pass."""

    def take_part(self) -> None:
        """Compute this rank's share of a pass in which it has no rows of its own."""

    def watch(self, watch: PassWatch) -> None:
        """Report to this watch from now on, in place of the one before."""

    def close(self) -> None:
        """Close the ranks' sockets. No pass can begin any more."""

    @property
    def totals(self) -> PassTotals:
        """The passes since ``watch`` was called last."""
