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

    ``mpi`` is left out: mpirun must start the ranks itself, but the controller starts them.
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
    """The number of the group's start. Frames of an earlier start are ignored."""
    curve: CurveKeys | None = None
    """The group's own key pair, for peers over TCP."""
    shard_vocabulary: bool = False
    """Whether embedding and head are divided too."""

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} is not below the group's size {self.size}")
        for name, each in (("addresses", self.addresses), ("peers", self.peers)):
            if len(each) != self.size:
                raise ValueError(f"{len(each)} {name} for a group of {self.size}")
