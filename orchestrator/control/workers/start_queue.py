"""Start queue: one failure domain loads at a time per machine, first starts and restarts alike."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import Loss, SendStart, Spawn
from mlx_dp.orchestrator.control.workers.record import FailureDomain, FailureDomains, WorkerRecord
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.events import WorkerPhase

_PROGRESS: Final = (None, *WorkerPhase)
"""The phases of a start, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLimits:
    """``hello_timeout_s``: from the spawn to ``Hello``, before anything is loaded.

    ``form_timeout_s``: until the ranks of a group have met, once all of them are up.
    """

    hello_timeout_s: float = 60.0
    form_timeout_s: float = 60.0
    start_timeout_s: float = 600.0


class StartQueue:
    """Decides when a worker starts, and sets its identity and its deadlines.

    The ranks of a group need each other to load: they are spawned together, and told to load once
    all of them are up, so that none waits for one that is still being spawned.
    """

    def __init__(self, domains: FailureDomains, limits: StartLimits, rng: random.Random) -> None:
        self._domains: Final = domains
        self._limits: Final = limits
        self._rng: Final = rng

    def next_spawn(self, now: float) -> list[Spawn]:
        """Begin the next start, unless one is still under way on its machine."""
        # A failed start is over only when its process, and so its memory, is gone.
        loading = [domain for domain in self._domains if domain.is_loading]
        for domain in self._domains:
            if not domain.all_placed or (
                not domain.is_loading and any(domain.shares_machine(other) for other in loading)
            ):
                continue
            if any(member.has_process and member.pid is None for member in domain.members):
                # The next process is needed only if this one could be started.
                return []
            for worker in domain.members:
                if worker.status is WorkerStatus.STARTING and not worker.has_process:
                    return [self._spawn(worker, now)]
        return []

    def _spawn(self, worker: WorkerRecord, now: float) -> Spawn:
        worker.spawns += 1
        worker.identity = f"w{worker.index}-{self._rng.getrandbits(64):016x}"
        worker.pid = None
        worker.has_process = True
        worker.hello_received = worker.start_sent = worker.served = False
        worker.phase = None
        worker.set_deadline(now, self._limits.hello_timeout_s)
        return Spawn(worker.index, worker.identity)

    def on_hello(self, worker: WorkerRecord, now: float) -> list[SendStart]:
        """Note a ``Hello``; once the whole group has sent one, tell its members to load."""
        worker.hello_received = True
        worker.set_deadline(now, math.inf)
        members = self._domains.domain_of(worker.index).members
        if not all(member.hello_received for member in members):
            return []
        alone = len(members) == 1
        timeout_s = self._limits.start_timeout_s if alone else self._limits.form_timeout_s
        for member in members:
            member.start_sent = True
            member.set_deadline(now, timeout_s)
        return [SendStart(member.index, member.identity) for member in members]

    def on_phase(self, worker: WorkerRecord, phase: WorkerPhase, now: float) -> None:
        """Note the phase of its start that a worker reports."""
        if not worker.start_sent or _PROGRESS.index(phase) <= _PROGRESS.index(worker.phase):
            return
        worker.phase = phase
        if phase is WorkerPhase.FORMING:
            # All wait for the rank that came last, whose time has only begun.
            for member in self._domains.domain_of(worker.index).members:
                if member.phase is WorkerPhase.FORMING:
                    member.set_deadline(now, self._limits.form_timeout_s)
        elif phase is WorkerPhase.LOADING:
            worker.set_deadline(now, self._limits.start_timeout_s)

    def find_late(
        self, now: float, halted: Callable[[int], bool]
    ) -> tuple[WorkerRecord, Loss] | None:
        """Return the worker whose start takes too long, if any, and its loss.

        In a group it is the least advanced rank, or one whose process was ``halted`` by a signal:
        the others may be late only because of it.
        """
        for domain in self._domains:
            late = [each for each in domain.starting if each.start_deadline <= now]
            if late:
                stopped = [each for each in domain.starting if halted(each.index)]
                behind = stopped or _least_advanced(domain)
                worker = next((each for each in late if each in behind), behind[0])
                detail = self._too_late(worker, behind, domain)
                detail = f"{detail}, stopped by a signal" if stopped else detail
                return worker, Loss(kind=LossKind.START_TIMEOUT, detail=detail)
        return None

    def _too_late(
        self, worker: WorkerRecord, behind: list[WorkerRecord], domain: FailureDomain
    ) -> str:
        limits = self._limits
        phase = "none" if worker.phase is None else worker.phase.value
        if not worker.hello_received:
            return f"no hello after {limits.hello_timeout_s:g} s"
        if len(domain.members) == 1:
            return f"not ready after {limits.start_timeout_s:g} s"
        if worker.phase in (None, WorkerPhase.FORMING):
            numbers = ", ".join(str(each.index) for each in behind)
            detail = f"the group has not formed after {limits.form_timeout_s:g} s"
            size = len(domain.members)
            return f"{detail}: waiting for rank {numbers} of {size} (last reported phase: {phase})"
        detail = f"the group is not ready after {limits.start_timeout_s:g} s"
        return f"{detail}: this rank is the slowest (last reported phase: {phase})"

    def extend_deadlines(self, now: float, missed_s: float) -> None:
        """Extend the deadlines by the time that the controller missed."""
        for domain in self._domains:
            for worker in domain.members:
                # A deadline may have been set after the controller woke up, before it noticed.
                worker.start_deadline += min(missed_s, now - worker.deadline_set_at)


def _least_advanced(domain: FailureDomain) -> list[WorkerRecord]:
    """The workers of a starting domain that have made the least progress."""

    def progress(worker: WorkerRecord) -> tuple[bool, int]:
        return worker.hello_received, _PROGRESS.index(worker.phase)

    least = min(progress(worker) for worker in domain.starting)
    return [worker for worker in domain.starting if progress(worker) == least]
