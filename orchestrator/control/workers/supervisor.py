"""The supervisor keeps workers alive: events and the time go in, actions come out; no I/O."""

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
from mlx_dp.orchestrator.control.workers.kill_ladder import KillLimits, due_kills, hasten, lose
from mlx_dp.orchestrator.control.workers.loss import (
    Blame,
    RestartAt,
    StayDown,
    blame,
    blame_reports,
    explain,
    give_up,
    hopeless,
    may_be_explained,
    recover,
)
from mlx_dp.orchestrator.control.workers.record import (
    ALIVE,
    FailureDomain,
    FailureDomains,
    WorkerRecord,
)
from mlx_dp.orchestrator.control.workers.start_queue import StartLimits, StartQueue
from mlx_dp.orchestrator.exit_status import describe_exit, failure_of
from mlx_dp.orchestrator.restart_budget import RestartLimits
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.protocol import Failed, WorkerPhase

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
        """Every worker has failed for good."""
        return all(worker.status is WorkerStatus.FAILED for worker in self.workers)

    @property
    def gone(self) -> bool:
        """No process is left."""
        return not any(worker.process for worker in self.workers)

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

    def spawned(self, index: int, pid: int, now: float) -> list[Action]:
        """The process of a worker exists."""
        worker = self.workers[index]
        worker.pid = pid
        _logger.info("worker %s: started, %s", index, worker.tag)
        return self._spawn_next(now)

    def greeted(self, index: int, now: float) -> list[Action]:
        """A worker said hello. Raises ProtocolError when it had done so before."""
        worker = self.workers[index]
        if worker.status is not WorkerStatus.STARTING or worker.greeted:
            raise ProtocolError(f"worker {index}: hello while {worker.status.value}")
        return [*self._start_queue.greeted(worker, now)]

    def heard(self, index: int, phase: WorkerPhase, now: float) -> None:
        """A worker reports the phase of its start."""
        self._start_queue.heard(self.workers[index], phase, now)

    def ready(self, index: int, now: float) -> list[Action]:
        """A worker can serve. Raises ProtocolError when it was not told to load."""
        worker = self.workers[index]
        if worker.status is not WorkerStatus.STARTING or not worker.told:
            raise ProtocolError(f"worker {index}: ready while {worker.status.value}")
        worker.move(WorkerStatus.READY, now)
        worker.served = worker.ready_once = True
        worker.message = ""
        domain = self.domains.domain_of(index)
        if domain.ready:
            domain.ready_since = now
            domain.budget.succeeded()
        if self._stopping:
            # It was told to exit while it loaded, and gets no request.
            worker.move(WorkerStatus.DRAINING, now)
            return []
        return [AddOwner(index, worker.identity), *self._spawn_next(now)]

    def failed(self, index: int, fact: Failed, now: float) -> list[Action]:
        """A worker reports that it gives up, and exits by itself."""
        return self.lost(index, Loss.told(fact), now)

    def exited(self, index: int, status: int, now: float) -> list[Action]:
        """The process of a worker is gone. Any exit that was not requested is a loss."""
        worker = self.workers[index]
        worker.process = False
        worker.kill_at = None
        given_up = self._stopping or worker.status not in ALIVE
        ending = describe_exit(status, expected=given_up)
        _logger.info("worker %s: pid %s %s, epoch %s", index, worker.pid, ending, worker.epoch)
        domain = self.domains.domain_of(index)
        hasten(domain.members, self._limits.kill, stopping=self._stopping, now=now)
        if self._stopping:
            return self._stopped(worker, ending, now)
        loss = Loss(kind=LossKind.EXIT, detail=ending, failure=failure_of(status))
        if worker.status in ALIVE:
            return self.lost(index, loss, now)
        explain(domain, worker, loss)
        return self._settle(domain, now)

    def spawn_failed(self, index: int, detail: str, now: float) -> list[Action]:
        """The process of a worker could not be started."""
        self.workers[index].process = False
        return self.lost(index, Loss(kind=LossKind.EXIT, detail=detail), now)

    def lost(self, index: int, loss: Loss, now: float) -> list[Action]:
        """Give up a worker: its further events are dropped. A second loss changes nothing.

        A loss that the exit of another process of its group may explain waits for that.
        """
        if self.workers[index].status not in ALIVE:
            return []
        domain = self.domains.domain_of(index)
        worker = self.workers[index]
        if not may_be_explained(domain, worker, loss):
            return self._lose(domain, blame(domain, worker, loss), now)
        domain.hold(index, loss, now + self._limits.peer_exit_wait_s)
        return [CloseOwner(member.index, member.identity) for member in domain.members]

    def _lose(self, domain: FailureDomain, found: Blame, now: float) -> list[Action]:
        worker, loss = found.worker, found.loss
        _logger.warning(
            "worker %s: lost, %s: %s: %s", worker.index, worker.tag, loss.kind.value, loss.detail
        )
        domain.reports.clear()
        domain.loss = loss
        steps: list[Action] = []
        for member in domain.members:
            own = loss if member is worker else found.others
            culprit = member is worker and found.certain
            steps += lose(member, own, self._limits.kill, culprit=culprit, now=now)
        return steps + self._settle(domain, now)

    def drain(self, index: int, now: float) -> list[Action]:
        """Have a ready worker and its group take no further request, ahead of ``retire``."""
        steps: list[Action] = []
        for member in self.domains.domain_of(index).members:
            member.move(WorkerStatus.DRAINING, now)
            member.message = "restarts on request"
            _logger.info("worker %s: drains for a restart, %s", member.index, member.tag)
            steps.append(DrainOwner(member.index, member.identity))
        return steps

    def retire(self, index: int, now: float) -> list[Action]:
        """Replace a draining worker and its group; the requests that they hold are lost to them."""
        domain = self.domains.domain_of(index)
        domain.reports.clear()
        domain.loss = Loss(kind=LossKind.RESTART, detail="restarted on request")
        steps: list[Action] = []
        for member in domain.members:
            steps += lose(member, domain.loss, self._limits.kill, culprit=False, now=now)
        return steps + self._settle(domain, now)

    def _settle(self, domain: FailureDomain, now: float) -> list[Action]:
        """Decide what follows a loss, when no process of the domain is left."""
        steps: list[Action] = []
        undecided = domain.loss is not None and domain.restart_at is None
        if undecided and domain.gone and not self._stopping:
            assert domain.loss is not None
            match recover(domain, domain.loss, self._limits.restart, self._rng, now):
                case RestartAt(time=time):
                    domain.restart_at = time
                case StayDown(loss=loss):
                    self._cause = loss
                    for each in hopeless(self.domains, domain, loss):
                        steps += give_up(each, loss, now)
        return steps + self._spawn_next(now)

    def tick(self, now: float, halted: Callable[[int], bool] = lambda index: False) -> list[Action]:
        """Do what is due. ``halted``: whether the process of a worker was stopped by a signal."""
        steps = due_kills(self.workers, now)
        late = None if self._stopping else self._start_queue.late(now, halted)
        if late is not None:
            worker, loss = late
            steps += self.lost(worker.index, loss, now)
        for domain in self.domains:
            if domain.reports and domain.reports_due_at <= now:
                steps += self._lose(domain, blame_reports(domain), now)
            if domain.restart_at is not None and domain.restart_at <= now and not self._stopping:
                domain.begin_anew(now)
        return steps + self._spawn_next(now)

    def _spawn_next(self, now: float) -> list[Action]:
        return [] if self._stopping else [*self._start_queue.next(now)]

    def forgive(self, now: float, missed_s: float) -> None:
        """Count no time against a start that the controller itself missed."""
        self._start_queue.forgive(now, missed_s)

    def stop(self, now: float) -> None:
        """Restart no worker any more; those that have a process are expected to exit."""
        if self._stopping:
            return
        self._stopping = True
        for worker in self.workers:
            if worker.status is WorkerStatus.READY:
                worker.move(WorkerStatus.DRAINING, now)
            elif not worker.process and worker.status is not WorkerStatus.FAILED:
                worker.move(WorkerStatus.STOPPED, now)

    def _stopped(self, worker: WorkerRecord, ending: str, now: float) -> list[Action]:
        steps: list[Action] = []
        if worker.status in ALIVE:
            loss = Loss(kind=LossKind.EXIT, detail=ending)
            steps.append(RemoveOwner(worker.index, worker.identity, loss, culprit=False))
        if worker.status is not WorkerStatus.FAILED:
            worker.move(WorkerStatus.STOPPED, now)
        return steps
