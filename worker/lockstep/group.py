"""Joins the MLX group of which this process is one rank."""

import json
import os
from tempfile import TemporaryFile
from typing import IO, Any, Final, TypeAlias, assert_never

import mlx.core as mx

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from mlx_dp.worker.contract.peers import RankLostError
from mlx_dp.worker.loading import device

# MLX ships no types for its modules.
Group: TypeAlias = Any

_INSTALL_HINT: Final = "is not in this build of MLX"


def join(place: GroupPlace) -> Group:
    """Join the other ranks; blocks until all have joined.

    Raises ConfigError for a backend that is not available, and RankLostError when the group cannot
    form.
    """
    backend = place.backend.value
    if not mx.distributed.is_available(backend):
        there = device.backends()
        advice = f"use {' or '.join(there)}" if there else "this machine has none"
        raise ConfigError(f"--distributed-backend {backend} {_INSTALL_HINT}: {advice}")
    # The file is read while the group forms, and never again. It has no name, so that
    # nothing is left of it when this process is killed meanwhile.
    with TemporaryFile("w") as scratch:
        os.environ.update(_environment(place, scratch))
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise RankLostError(f"rank {place.rank} cannot meet its group: {error}") from error
    if (group.rank(), group.size()) != (place.rank, place.size):
        raise ConfigError(
            f"MLX made this process rank {group.rank()} of {group.size()}, but it was started as "
            f"rank {place.rank} of {place.size}"
        )
    return group


def _environment(place: GroupPlace, scratch: IO[str]) -> dict[str, str]:
    """The environment that MLX's backends read. Where one reads a file, that is ``scratch``."""
    host, _, port = place.addresses[0].rpartition(":")
    match place.backend:
        case DistributedBackend.RING:
            json.dump([[address] for address in place.addresses], scratch)
            scratch.flush()
            # Opening /dev/fd/N may duplicate the descriptor, with its offset in the file.
            scratch.seek(0)
            return {"MLX_RANK": str(place.rank), "MLX_HOSTFILE": f"/dev/fd/{scratch.fileno()}"}
        case DistributedBackend.JACCL:
            # Its devices are in MLX_IBV_DEVICES, which the user has set to match the cables.
            return {"MLX_RANK": str(place.rank), "MLX_JACCL_COORDINATOR": place.addresses[0]}
        case DistributedBackend.NCCL:
            return {
                "MLX_RANK": str(place.rank),
                "MLX_WORLD_SIZE": str(place.size),
                "NCCL_HOST_IP": host,
                "NCCL_PORT": port,
            }
        case _:
            assert_never(place.backend)
