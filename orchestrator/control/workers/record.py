"""The supervisor's record of each worker, and of the failure domain that it belongs to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.state.transitions import step
from mlx_dp.orchestrator.control.workers.actions import Loss
from mlx_dp.orchestrator.restart_budget import BackOff, RestartBudget, RestartLimits
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.messages.events import WorkerPhase

NEXT: Final[Mapping[WorkerStatus, frozenset[WorkerStatus]]] = MappingProxyType(
    {
        WorkerStatus.STARTING: frozenset(
            {WorkerStatus.READY, WorkerStatus.LOST, WorkerStatus.FAILED, WorkerStatus.STOPPED}
        ),
        WorkerStatus.READY: frozenset({WorkerStatus.DRAINING, WorkerStatus.LOST}),
        WorkerStatus.DRAINING: frozenset({WorkerStatus.LOST, WorkerStatus.STOPPED}),
        WorkerStatus.LOST: frozenset(
            {WorkerStatus.STARTING, WorkerStatus.FAILED, WorkerStatus.STOPPED}
        ),
        WorkerStatus.STOPPED: frozenset(),
        WorkerStatus.FAILED: frozenset(),
    }
)

ALIVE: Final = frozenset({WorkerStatus.STARTING, WorkerStatus.READY, WorkerStatus.DRAINING})
"""The states of a worker that can still be lost."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker across its incarnations.

    ``has_process``: whether the process of the present incarnation may exist. It is False from its
    exit until the next spawn. A STARTING worker without a process waits in the start queue.
    """

    index: int
    status: WorkerStatus = WorkerStatus.STARTING
    identity: str = ""
    pid: int | None = None
    has_process: bool = False
    hello_received: bool = False
    """Its ``Hello`` has come."""
    start_sent: bool = False
    """Its ``Start`` was sent."""
    phase: WorkerPhase | None = None
    """The phase of its start, by its own report."""
    served: bool = False
    """This incarnation became ready."""
    start_deadline: float = 0.0
    deadline_set_at: float = 0.0
    """When its deadline was set."""
    kill_at: float | None = None
    spawns: int = 0
    ready_once: bool = False
    message: str = ""
    """Why it is not ready, for people."""
    since: float = 0.0
    """When its status last changed."""
    epoch: int = 0
    """How often its group was restarted."""
    last_cause: str = ""
    """Why it was last given up, for people."""
    host: str | None = ""
    """The machine that has a place for it: "" is the controller's, None is none at present."""

    def change_status(self, to: WorkerStatus, now: float) -> None:
        self.status = step(NEXT, "worker", self.index, self.status, to)
        self.since = now

    def set_deadline(self, now: float, timeout_s: float) -> None:
        """Set the deadline of the next part of its start."""
        self.deadline_set_at = now
        self.start_deadline = now + timeout_s

    @property
    def tag(self) -> str:
        """Its process, for the log."""
        return f"pid {self.pid}, incarnation {self.incarnation}, epoch {self.epoch}"

    @property
    def unplaced(self) -> bool:
        """Whether no machine has a place for it; nothing tells when it will start."""
        return self.host is None and not self.has_process

    @property
    def restarts(self) -> int:
        return max(0, self.spawns - 1)

    @property
    def incarnation(self) -> str:
        return self.identity.partition("-")[2]


@dataclass(slots=True, eq=False)
class FailureDomain:
    """Workers that are restarted as one: a single replica, or a whole dp-attention group.

    ``loss`` is set from the first loss until the restart. ``reports``, by worker, are losses that
    only report that a peer or a connection is gone. They are held until ``reports_due_at``, since
    the exit of a process may say why.
    """

    members: tuple[WorkerRecord, ...]
    budget: RestartBudget
    back_off: BackOff
    loss: Loss | None = None
    ready_since: float | None = None
    restart_at: float | None = None
    exits: dict[int, int] = field(default_factory=dict)
    """Exit statuses by worker, in the order in which they were seen, until the restart."""
    reports: dict[int, Loss] = field(default_factory=dict)
    reports_due_at: float = 0.0

    def hold_report(self, index: int, loss: Loss, due_at: float) -> None:
        """Hold a report. A second one from the same worker is ignored."""
        if not self.reports:
            self.reports_due_at = due_at
        self.reports.setdefault(index, loss)

    def restart(self, now: float) -> None:
        """Put all members into the start queue, in a new epoch."""
        self.restart_at = None
        self.loss = None
        self.reports.clear()
        self.exits.clear()
        for member in self.members:
            member.change_status(WorkerStatus.STARTING, now)
            member.epoch += 1
            member.identity = ""

    @property
    def all_exited(self) -> bool:
        """Whether no process is left, so a new incarnation cannot meet the old one."""
        return not any(member.has_process for member in self.members)

    @property
    def starting(self) -> list[WorkerRecord]:
        """The members whose process exists and is not ready yet."""
        return [
            member
            for member in self.members
            if member.has_process and member.status is WorkerStatus.STARTING
        ]

    @property
    def all_placed(self) -> bool:
        """Whether each member has a machine."""
        return all(member.host is not None for member in self.members)

    @property
    def any_remote(self) -> bool:
        """Whether some member runs on another machine than the controller's."""
        return any(member.host != "" for member in self.members)

    def shares_machine(self, other: "FailureDomain") -> bool:
        """Whether both have members on one machine, and so on the same device."""
        hosts = {member.host for member in self.members}
        return not hosts.isdisjoint(member.host for member in other.members)

    @property
    def is_loading(self) -> bool:
        """Whether a start is in progress, or processes of a failed start are left."""
        return any(member.has_process and not member.served for member in self.members)

    @property
    def all_ready(self) -> bool:
        return all(member.status is WorkerStatus.READY for member in self.members)


def _make_domain(members: tuple[WorkerRecord, ...], limits: RestartLimits) -> FailureDomain:
    return FailureDomain(
        members=members,
        budget=RestartBudget(limit=limits.max_restarts, window_s=limits.window_s),
        back_off=BackOff(
            first_s=limits.first_delay_s,
            longest_s=limits.longest_delay_s,
            healthy_s=limits.healthy_s,
        ),
    )


class FailureDomains:
    """The failure domains: each replica is one, or the whole dp-attention group is."""

    def __init__(
        self, workers: tuple[WorkerRecord, ...], mode: ReplicaMode, limits: RestartLimits
    ) -> None:
        one_for_all = mode is ReplicaMode.DP_ATTENTION
        groups = [workers] if one_for_all else [(worker,) for worker in workers]
        self._domains: Final = tuple(_make_domain(group, limits) for group in groups)
        self._by_index: Final = {
            worker.index: domain for domain in self._domains for worker in domain.members
        }

    def __iter__(self) -> Iterator[FailureDomain]:
        return iter(self._domains)

    def domain_of(self, index: int) -> FailureDomain:
        return self._by_index[index]
