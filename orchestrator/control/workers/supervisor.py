"""Supervisor: keeps workers alive. Pure: events and the time go in, actions come out."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import (
    Action,
    AddOwner,
    CloseOwner,
    DrainOwner,
    Loss,
    RemoveOwner,
)
from mlx_dp.orchestrator.control.workers.blame import (
    Blame,
    add_exit,
    blame_from_reports,
    find_blame,
    may_be_explained,
)
from mlx_dp.orchestrator.control.workers.kill_ladder import (
    KillLimits,
    due_kills,
    mark_lost,
    shorten_grace,
)
from mlx_dp.orchestrator.control.workers.record import (
    ALIVE,
    FailureDomain,
    FailureDomains,
    WorkerRecord,
)
from mlx_dp.orchestrator.control.workers.recovery import (
    RestartAt,
    StayDown,
    decide_recovery,
    domains_given_up,
    mark_failed,
)
from mlx_dp.orchestrator.control.workers.start_queue import StartLimits, StartQueue
from mlx_dp.orchestrator.exit_status import describe_exit, failure_of
from mlx_dp.orchestrator.restart_budget import RestartLimits
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import Failed, WorkerPhase

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLimits:
    """Limits of starts, kills and restarts.

    ``peer_exit_wait_s``: how long the report of a lost peer waits for the exit that explains it.
    """

    start: StartLimits = field(default_factory=StartLimits)
    kill: KillLimits = field(default_factory=KillLimits)
    restart: RestartLimits = field(default_factory=RestartLimits)
    peer_exit_wait_s: float = 0.5


class Supervisor:
    """The life cycles of the workers. One replica loads at a time.

    Replicas are restarted one by one, a dp-attention group as one under a new epoch, and never
    before every process of the old incarnation is gone.
    """

    def __init__(
        self, size: int, mode: ReplicaMode, limits: SupervisorLimits, rng: random.Random
    ) -> None:
        self._limits: Final = limits
        self._rng: Final = rng
        self.workers: Final = tuple(WorkerRecord(index) for index in range(size))
        self.domains: Final = FailureDomains(self.workers, mode, limits.restart)
        self._start_queue: Final = StartQueue(self.domains, limits.start, rng)
        self._stopping = False
        self._cause: Loss | None = None

    @property
    def dead(self) -> bool:
        """Whether every worker has failed for good."""
        return all(worker.status is WorkerStatus.FAILED for worker in self.workers)

    @property
    def all_exited(self) -> bool:
        """Whether no process is left."""
        return not any(worker.has_process for worker in self.workers)

    @property
    def cause(self) -> Loss | None:
        """Why the last worker failed for good, or None while none has."""
        return self._cause

    def start(self, now: float) -> list[Action]:
        """Start the first worker; the others follow."""
        for worker in self.workers:
            worker.since = now
        return self._spawn_next(now)

    def set_hosts(self, host_of: Callable[[int], str | None]) -> None:
        """Note which machine has a place for each worker; ``tick`` uses it."""
        for worker in self.workers:
            worker.host = host_of(worker.index)

    def on_spawned(self, index: int, pid: int, now: float) -> list[Action]:
        """Handle the start of a worker's process."""
        worker = self.workers[index]
        worker.pid = pid
        _logger.info("worker %s: started, %s", index, worker.tag)
        return self._spawn_next(now)

    def on_hello(self, index: int, now: float) -> list[Action]:
        """Handle a ``Hello``. Raises ProtocolError if it is not the first of this incarnation."""
        worker = self.workers[index]
        if worker.status is not WorkerStatus.STARTING or worker.hello_received:
            raise ProtocolError(f"worker {index}: hello while {worker.status.value}")
        return [*self._start_queue.on_hello(worker, now)]

    def on_phase(self, index: int, phase: WorkerPhase, now: float) -> None:
        """Handle the phase of its start that a worker reports."""
        self._start_queue.on_phase(self.workers[index], phase, now)

    def on_ready(self, index: int, now: float) -> list[Action]:
        """Handle a ``Ready``. Raises ProtocolError if the worker was not told to load."""
        worker = self.workers[index]
        if worker.status is not WorkerStatus.STARTING or not worker.start_sent:
            raise ProtocolError(f"worker {index}: ready while {worker.status.value}")
        worker.change_status(WorkerStatus.READY, now)
        worker.served = worker.ready_once = True
        worker.message = ""
        domain = self.domains.domain_of(index)
        if domain.all_ready:
            domain.ready_since = now
            domain.budget.succeeded()
        if self._stopping:
            # It was told to exit while it loaded, and gets no request.
            worker.change_status(WorkerStatus.DRAINING, now)
            return []
        return [AddOwner(index, worker.identity), *self._spawn_next(now)]

    def on_failed(self, index: int, failed: Failed, now: float) -> list[Action]:
        """Handle a ``Failed``: the worker has given up, and exits by itself."""
        return self.on_loss(index, Loss.from_report(failed), now)

    def on_exit(self, index: int, status: int, now: float) -> list[Action]:
        """Handle the exit of a worker's process. An exit that was not requested is a loss."""
        worker = self.workers[index]
        worker.has_process = False
        worker.kill_at = None
        given_up = self._stopping or worker.status not in ALIVE
        ending = describe_exit(status, expected=given_up)
        _logger.info("worker %s: pid %s %s, epoch %s", index, worker.pid, ending, worker.epoch)
        domain = self.domains.domain_of(index)
        shorten_grace(domain.members, self._limits.kill, stopping=self._stopping, now=now)
        if self._stopping:
            return self._on_requested_exit(worker, ending, now)
        loss = Loss(kind=LossKind.EXIT, detail=ending, failure=failure_of(status))
        if worker.status in ALIVE:
            return self.on_loss(index, loss, now)
        add_exit(domain, worker, loss)
        return self._decide_recovery(domain, now)

    def on_spawn_failed(self, index: int, detail: str, now: float) -> list[Action]:
        """Handle a process that could not be started."""
        self.workers[index].has_process = False
        return self.on_loss(index, Loss(kind=LossKind.EXIT, detail=detail), now)

    def on_loss(self, index: int, loss: Loss, now: float) -> list[Action]:
        """Give up a worker: its further events are dropped. A second loss changes nothing.

        A loss that the exit of another process of its group may explain waits for that exit.
        """
        if self.workers[index].status not in ALIVE:
            return []
        domain = self.domains.domain_of(index)
        worker = self.workers[index]
        if not may_be_explained(domain, worker, loss):
            return self._declare_lost(domain, find_blame(domain, worker, loss), now)
        domain.hold_report(index, loss, now + self._limits.peer_exit_wait_s)
        return [CloseOwner(member.index, member.identity) for member in domain.members]

    def _declare_lost(self, domain: FailureDomain, found: Blame, now: float) -> list[Action]:
        worker, loss = found.worker, found.loss
        _logger.warning(
            "worker %s: lost, %s: %s: %s", worker.index, worker.tag, loss.kind.value, loss.detail
        )
        domain.reports.clear()
        domain.loss = loss
        actions: list[Action] = []
        for member in domain.members:
            own = loss if member is worker else found.others
            culprit = member is worker and found.certain
            actions += mark_lost(member, own, self._limits.kill, culprit=culprit, now=now)
        return actions + self._decide_recovery(domain, now)

    def drain(self, index: int, now: float) -> list[Action]:
        """Stop granting to a ready worker and its group. ``retire`` follows."""
        actions: list[Action] = []
        for member in self.domains.domain_of(index).members:
            member.change_status(WorkerStatus.DRAINING, now)
            member.message = "restarts on request"
            _logger.info("worker %s: drains for a restart, %s", member.index, member.tag)
            actions.append(DrainOwner(member.index, member.identity))
        return actions

    def retire(self, index: int, now: float) -> list[Action]:
        """Replace a draining worker and its group; their remaining requests are requeued."""
        domain = self.domains.domain_of(index)
        domain.reports.clear()
        domain.loss = Loss(kind=LossKind.RESTART, detail="restarted on request")
        actions: list[Action] = []
        for member in domain.members:
            actions += mark_lost(member, domain.loss, self._limits.kill, culprit=False, now=now)
        return actions + self._decide_recovery(domain, now)

    def _decide_recovery(self, domain: FailureDomain, now: float) -> list[Action]:
        """Restart a lost domain or give it up, once no process of it is left."""
        actions: list[Action] = []
        undecided = domain.loss is not None and domain.restart_at is None
        if undecided and domain.all_exited and not self._stopping:
            assert domain.loss is not None
            match decide_recovery(domain, domain.loss, self._limits.restart, self._rng, now):
                case RestartAt(time=time):
                    domain.restart_at = time
                case StayDown(loss=loss):
                    self._cause = loss
                    for each in domains_given_up(self.domains, domain, loss):
                        actions += mark_failed(each, loss, now)
        return actions + self._spawn_next(now)

    def tick(self, now: float, halted: Callable[[int], bool] = lambda index: False) -> list[Action]:
        """Do what is due. ``halted`` tells whether a worker's process was stopped by a signal."""
        actions = due_kills(self.workers, now)
        late = None if self._stopping else self._start_queue.find_late(now, halted)
        if late is not None:
            worker, loss = late
            actions += self.on_loss(worker.index, loss, now)
        for domain in self.domains:
            if domain.reports and domain.reports_due_at <= now:
                actions += self._declare_lost(domain, blame_from_reports(domain), now)
            if domain.restart_at is not None and domain.restart_at <= now and not self._stopping:
                domain.restart(now)
        return actions + self._spawn_next(now)

    def _spawn_next(self, now: float) -> list[Action]:
        return [] if self._stopping else [*self._start_queue.next_spawn(now)]

    def extend_deadlines(self, now: float, missed_s: float) -> None:
        """Extend the deadlines of starts by the time that the controller itself missed."""
        self._start_queue.extend_deadlines(now, missed_s)

    def stop(self, now: float) -> None:
        """Stop restarting workers; those that have a process are expected to exit."""
        if self._stopping:
            return
        self._stopping = True
        for worker in self.workers:
            if worker.status is WorkerStatus.READY:
                worker.change_status(WorkerStatus.DRAINING, now)
            elif not worker.has_process and worker.status is not WorkerStatus.FAILED:
                worker.change_status(WorkerStatus.STOPPED, now)

    def _on_requested_exit(self, worker: WorkerRecord, ending: str, now: float) -> list[Action]:
        actions: list[Action] = []
        if worker.status in ALIVE:
            loss = Loss(kind=LossKind.EXIT, detail=ending)
            actions.append(RemoveOwner(worker.index, worker.identity, loss, culprit=False))
        if worker.status is not WorkerStatus.FAILED:
            worker.change_status(WorkerStatus.STOPPED, now)
        return actions
