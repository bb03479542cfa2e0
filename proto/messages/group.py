"""The place of one process in a group that computes in lockstep."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.capacity.parallel import MAX_OWNERS, Rank, Size
from mlx_dp.proto.fields import Epoch, Text
from mlx_dp.proto.messages.curve_keys import CurveKeys

EachRank = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_OWNERS)]


class DistributedBackend(StrEnum):
    """The transport of a group's collectives, in MLX's names.

    ``mpi`` is left out: mpirun insists on starting the ranks, which is the controller's task.
    """

    RING = "ring"
    JACCL = "jaccl"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The ranks of a group and their addresses. No two generations share an address.

    ``addresses`` are those of the collectives (host:port), bound by the backend itself; ``peers``
    are ZeroMQ endpoints of the ranks' exchange, each bound by its rank. Both are in the order of
    ranks.
    """

    backend: DistributedBackend
    rank: Rank
    size: Size
    addresses: EachRank
    peers: EachRank
    generation: Epoch
    """Counts the starts of the group: what an earlier one says is not for this one."""
    curve: CurveKeys | None = None
    """The group's own pair, for peers that are met over TCP."""
    shard_vocabulary: bool = False
    """Embedding and head are divided too."""

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} is not below the group's size {self.size}")
        for name, each in (("addresses", self.addresses), ("peers", self.peers)):
            if len(each) != self.size:
                raise ValueError(f"{len(each)} {name} for a group of {self.size}")
