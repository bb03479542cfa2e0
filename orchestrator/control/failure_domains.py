"""Who fails together: each replica by itself, or a dp-attention group as one."""

from collections.abc import Iterator
from typing import Final

from mlx_dp.orchestrator.control.restart_budget import RestartLimits
from mlx_dp.orchestrator.control.worker_record import FailureDomain, WorkerRecord, domain_of
from mlx_dp.proto.parallel import ReplicaMode


class FailureDomains:
    """The domains of a fixed set of workers; each worker is in exactly one."""

    def __init__(
        self, workers: tuple[WorkerRecord, ...], mode: ReplicaMode, limits: RestartLimits
    ) -> None:
        one_for_all = mode is ReplicaMode.DP_ATTENTION
        groups = [workers] if one_for_all else [(worker,) for worker in workers]
        self._domains: Final = tuple(domain_of(group, limits) for group in groups)
        self._by_index: Final = {
            worker.index: domain for domain in self._domains for worker in domain.members
        }

    def __iter__(self) -> Iterator[FailureDomain]:
        return iter(self._domains)

    def of(self, index: int) -> FailureDomain:
        return self._by_index[index]
