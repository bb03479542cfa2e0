"""Replica modes, topologies, and the place of each process in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from mlx_dp.proto.errors import ConfigError

Rank = Annotated[int, Meta(ge=0, lt=1024)]
Size = Annotated[int, Meta(ge=1, le=1024)]
MAX_OWNERS: Final = 64


class ReplicaMode(StrEnum):
    DATA_PARALLEL = "data-parallel"
    DP_ATTENTION = "dp-attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelState:
    """Ranks and sizes of one process, in SGLang's names.

    Under data-parallel every replica has ``attn_dp_size`` 1 and ``attn_dp_rank`` 0; its number is
    in ``dp_rank`` alone.
    """

    dp_rank: Rank = 0
    dp_size: Size = 1
    tp_rank: Rank = 0
    tp_size: Size = 1
    attn_dp_rank: Rank = 0
    attn_dp_size: Size = 1
    attn_tp_rank: Rank = 0
    attn_tp_size: Size = 1

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("dp", self.dp_rank, self.dp_size),
            ("tp", self.tp_rank, self.tp_size),
            ("attn_dp", self.attn_dp_rank, self.attn_dp_size),
            ("attn_tp", self.attn_tp_rank, self.attn_tp_size),
        ):
            if rank >= size:
                raise ValueError(f"{name}_rank {rank} is not below {name}_size {size}")

    @property
    def owner(self) -> int:
        """The index of the owner: ``attn_dp_rank`` under dp-attention, else the replica's."""
        return self.attn_dp_rank if self.attn_dp_size > 1 else self.dp_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The validated shape of the whole service."""

    mode: ReplicaMode
    dp_size: int
    tp_size: int
    warnings: tuple[str, ...] = ()

    @property
    def attn_dp_size(self) -> int:
        return self.dp_size if self.mode is ReplicaMode.DP_ATTENTION else 1

    def members(self) -> Iterator[ParallelState]:
        """Yield the state of every process, in the order of their owners."""
        for rank in range(self.dp_size):
            if self.mode is ReplicaMode.DATA_PARALLEL:
                yield ParallelState(dp_rank=rank, dp_size=self.dp_size)
            else:
                yield ParallelState(
                    dp_rank=rank,
                    dp_size=self.dp_size,
                    tp_rank=rank,
                    tp_size=self.tp_size,
                    attn_dp_rank=rank,
                    attn_dp_size=self.dp_size,
                )


def resolve_topology(*, dp_size: int, tp_size: int | None, enable_dp_attention: bool) -> Topology:
    """Validate the sizes from the flags. Sizes that do not divide are errors, never rounded.

    Raises ConfigError for sizes that are not positive, do not divide, or that this version
    cannot serve yet.
    """
    if not 1 <= dp_size <= MAX_OWNERS:
        raise ConfigError(f"--dp-size {dp_size} is out of range: use 1 to {MAX_OWNERS}")
    if tp_size is not None and not 1 <= tp_size <= MAX_OWNERS:
        raise ConfigError(f"--tp-size {tp_size} is out of range: use 1 to {MAX_OWNERS}")
    if not enable_dp_attention:
        if tp_size not in (None, 1):
            raise ConfigError(
                f"--tp-size {tp_size} needs --enable-dp-attention: plain replicas hold the whole "
                "model, so leave --tp-size at 1"
            )
        return Topology(mode=ReplicaMode.DATA_PARALLEL, dp_size=dp_size, tp_size=1)
    world = dp_size if tp_size is None else tp_size
    if world == 1 and dp_size == 1:
        return Topology(
            mode=ReplicaMode.DATA_PARALLEL,
            dp_size=1,
            tp_size=1,
            warnings=(
                "--enable-dp-attention does nothing with --dp-size 1: there is only one owner",
            ),
        )
    if world % dp_size:
        raise ConfigError(
            f"--tp-size {world} is not divisible by --dp-size {dp_size}: with "
            f"--enable-dp-attention use --tp-size {dp_size}, or omit it"
        )
    if world != dp_size:
        raise ConfigError(
            f"--tp-size {world} with --dp-size {dp_size} would split one owner's attention over "
            f"{world // dp_size} processes, and a ring cannot be split: use --dp-size {world}"
        )
    return Topology(mode=ReplicaMode.DP_ATTENTION, dp_size=dp_size, tp_size=world)
