"""The supervisor's record of each worker, and of the failure domain that it belongs to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from mlx_dp.orchestrator.control.actions import Loss
from mlx_dp.orchestrator.control.restart_budget import BackOff, RestartBudget, RestartLimits
from mlx_dp.orchestrator.control.transitions import step
from mlx_dp.orchestrator.service import WorkerStatus
from mlx_dp.proto.messages import WorkerPhase
from mlx_dp.proto.parallel import ReplicaMode

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
"""The states in which something can still be lost."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker across its incarnations.

    ``process`` says whether the present incarnation's process may exist: it is False from the
    exit that was seen until the next spawn. STARTING without a process waits for its turn.
    """

    index: int
    status: WorkerStatus = WorkerStatus.STARTING
    identity: str = ""
    pid: int | None = None
    process: bool = False
    greeted: bool = False
    """It said hello."""
    told: bool = False
    """It was told what to load."""
    phase: WorkerPhase | None = None
    """How far its start is, as it says itself."""
    served: bool = False
    """This incarnation became ready."""
    start_deadline: float = 0.0
    awaited_since: float = 0.0
    """When its deadline was set."""
    kill_at: float | None = None
    spawns: int = 0
    ready_once: bool = False
    message: str = ""
    """Why it is not ready, for people."""
    since: float = 0.0
    """When it got its status."""
    epoch: int = 0
    """How often its group was started anew."""
    last_cause: str = ""
    """Why it was last given up, for people."""
    host: str | None = ""
    """The machine it has a place on: "" is the controller's, None is none at present."""

    def move(self, to: WorkerStatus, now: float) -> None:
        self.status = step(NEXT, "worker", self.index, self.status, to)
        self.since = now

    def await_until(self, now: float, timeout_s: float) -> None:
        """Give the next part of its start its time."""
        self.awaited_since = now
        self.start_deadline = now + timeout_s

    @property
    def tag(self) -> str:
        """Which process it is, for the log."""
        return f"pid {self.pid}, incarnation {self.incarnation}, epoch {self.epoch}"

    @property
    def unplaced(self) -> bool:
        """No machine has a place for it, so that nobody knows when it will start."""
        return self.host is None and not self.process

    @property
    def restarts(self) -> int:
        return max(0, self.spawns - 1)

    @property
    def incarnation(self) -> str:
        return self.identity.partition("-")[2]


@dataclass(slots=True, eq=False)
class FailureDomain:
    """Workers that are restarted as one: a single replica, or a whole dp-attention group.

    ``loss`` is set from the first loss until the restart. ``reports`` are losses that say only that
    a peer or a connection is gone, by worker, held until ``reports_due_at``: the exit of a process
    may say why.
    """

    members: tuple[WorkerRecord, ...]
    budget: RestartBudget
    back_off: BackOff
    loss: Loss | None = None
    ready_since: float | None = None
    restart_at: float | None = None
    exits: dict[int, int] = field(default_factory=dict)
    """The statuses of those that have exited, the first to be seen first, until the restart."""
    reports: dict[int, Loss] = field(default_factory=dict)
    reports_due_at: float = 0.0

    def hold(self, index: int, loss: Loss, due_at: float) -> None:
        """Hold a report. A second one of the same worker says nothing more."""
        if not self.reports:
            self.reports_due_at = due_at
        self.reports.setdefault(index, loss)

    def begin_anew(self, now: float) -> None:
        """All of it waits for its turn to start, in a new epoch."""
        self.restart_at = None
        self.loss = None
        self.reports.clear()
        self.exits.clear()
        for member in self.members:
            member.move(WorkerStatus.STARTING, now)
            member.epoch += 1
            member.identity = ""

    @property
    def gone(self) -> bool:
        """No process of it is left, so that a new incarnation cannot meet the old one."""
        return not any(member.process for member in self.members)

    @property
    def starting(self) -> list[WorkerRecord]:
        """Those whose process is there and not ready yet."""
        return [
            member
            for member in self.members
            if member.process and member.status is WorkerStatus.STARTING
        ]

    @property
    def placed(self) -> bool:
        """There is a machine for each of its members."""
        return all(member.host is not None for member in self.members)

    @property
    def remote(self) -> bool:
        """Some of it runs on another machine."""
        return any(member.host != "" for member in self.members)

    def shares_machine(self, other: "FailureDomain") -> bool:
        """Whether both run on one machine in part, and so on the same device."""
        hosts = {member.host for member in self.members}
        return not hosts.isdisjoint(member.host for member in other.members)

    @property
    def loads(self) -> bool:
        """A start is under way, or the processes of a failed one are still there."""
        return any(member.process and not member.served for member in self.members)

    @property
    def ready(self) -> bool:
        return all(member.status is WorkerStatus.READY for member in self.members)


def domain_of(members: tuple[WorkerRecord, ...], limits: RestartLimits) -> FailureDomain:
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
