"""The servers under comparison: both replica modes and one process, their memory and counters."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from scripts.benchmarks.serving.server import Server, ServerSpec, our_spec

ONE: Final = "one process"
REPLICAS: Final = "2 replicas"
RANKS: Final = "2 ranks"
RANKS_AND_HEAD: Final = "2 ranks, LM head too"
FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    ONE: (),
    REPLICAS: ("--dp-size", "2"),
    RANKS: ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
}
HEAD: Final = "--enable-dp-lm-head"
_OWNER_COUNTS: Final = ("passes", "idle_passes", "peer_wait_seconds", "generation_tokens")


def mode_specs(model: Path, *, head: bool) -> list[ServerSpec]:
    """The modes; restarts are unlimited since kills are measured. ``head``: DP LM head, too."""
    modes = {**FLAGS, RANKS_AND_HEAD: (*FLAGS[RANKS], HEAD)} if head else FLAGS
    common = ("--model", str(model), "--served-model-name", "bench", "--max-restarts", "1000")
    return [our_spec(name, [*common, *flags]) for name, flags in modes.items()]


async def weights_nbytes(server: Server) -> list[int]:
    """The memory that each worker reports."""
    info = await server.client.get_json("/server_info")
    return [owner["weights_nbytes"] for owner in info["owners"]]


async def workers_rss_nbytes(server: Server) -> list[int]:
    """Resident memory of each worker, as the system counts it. Measured right after the start."""
    workers = (await server.client.get_json("/workers"))["workers"]
    return [int(psutil.Process(worker["pid"]).memory_info().rss) for worker in workers]


async def owner_counts(server: Server) -> Counter[tuple[str, int]]:
    """The counters of ``/metrics`` about passes, by name and rank."""
    page = (await server.client.get("/metrics")).decode()
    names = "|".join(_OWNER_COUNTS)
    pattern = rf'^mlx_dp:owner_({names})_total\{{dp_rank="(\d+)"\}} (\S+)$'
    found = re.findall(pattern, page, re.MULTILINE)
    return Counter({(name, int(rank)): float(value) for name, rank, value in found})
