"""Who fails together: each replica by itself, or a dp-attention group as one."""

from collections.abc import Iterator
from typing import Final

from mlx_dp.orchestrator.control.restart_budget import RestartLimits
from mlx_dp.orchestrator.control.supervisor_steps import Loss, LossKind
from mlx_dp.orchestrator.control.worker_record import FailureDomain, WorkerRecord, domain_of
from mlx_dp.orchestrator.process.exit_status import describe_exit, failure_of
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


def culprit_of(
    domain: FailureDomain, worker: WorkerRecord, loss: Loss
) -> tuple[WorkerRecord, Loss]:
    """Whose fault it is: those that lost a member of their group may say so before its end is due.

    An exit that was seen is settled only a moment later, when its last messages have been read.
    """
    for index, status in domain.exits.items():
        if index == worker.index:
            break
        member = next(member for member in domain.members if member.index == index)
        loss = Loss(kind=LossKind.EXIT, detail=describe_exit(status), failure=failure_of(status))
        return member, loss
    return worker, loss
