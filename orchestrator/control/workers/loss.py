"""Rules of a loss: which worker is to blame, and whether a restart can help."""

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import STUCK, GiveUp, Loss
from mlx_dp.orchestrator.control.workers.record import FailureDomain, WorkerRecord
from mlx_dp.orchestrator.control.workers.stalled_rank import chain_end
from mlx_dp.orchestrator.exit_status import describe_exit, failure_of
from mlx_dp.orchestrator.restart_budget import RestartLimits
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.protocol import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The worker that is blamed for the loss of its domain; ``certain``: it is its own fault.

    ``others``: the loss of the other workers of the domain.
    """

    worker: WorkerRecord
    loss: Loss
    certain: bool
    others: Loss


def may_be_explained(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> bool:
    """Whether a loss only reports that something is gone, and an exit that says why may still come.

    The system may report the exit of a process after its peers have noticed it, and they may also
    notice each other's exits before that. A worker that has lost a peer itself explains nothing.
    """
    secondhand = loss.kind is LossKind.DISCONNECTED and worker.served
    if not (secondhand or _lost_peer(loss)) or _exited_before(domain, worker, loss) is not None:
        return False
    innocent = {index for index, each in domain.reports.items() if _lost_peer(each)}
    if _lost_peer(loss):
        innocent.add(worker.index)
    return len(domain.members) > 1 and any(
        member.process and member.index not in innocent for member in domain.members
    )


def blame_reports(domain: FailureDomain) -> Blame:
    """Find the worker that failed first, when no exit has explained the reports that were held."""
    reports = domain.reports
    first = next(iter(reports))
    gone = [index for index, loss in reports.items() if not _lost_peer(loss)]
    waits = {index: loss.lost_rank for index, loss in reports.items() if loss.lost_rank is not None}
    ends = {chain_end(waits, index) for index in waits} - {None, *reports}
    if len(gone) == 1:
        return blame(domain, _worker(domain, gone[0]), reports[gone[0]])
    if not gone and len(ends) == 1:
        witness = next(index for index in waits if waits[index] in ends)
        return blame(domain, _worker(domain, witness), reports[witness])
    unnamed = replace(reports[first], lost_rank=None)
    return _uncertain(_worker(domain, first), unnamed, LossKind.SIBLING)


def blame(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> Blame:
    """Find the worker that failed first, when this one is the first to be given up."""
    exited = _exited_before(domain, worker, loss)
    if exited is not None:
        status = domain.exits[exited.index]
        left = Loss(kind=LossKind.EXIT, detail=describe_exit(status), failure=failure_of(status))
        return _certain(exited, left)
    if loss.failure is FailureKind.PEER_LOST:
        missed = _member(domain, loss.lost_rank)
        if missed is None or missed is worker:
            return _uncertain(worker, loss, LossKind.SIBLING)
        detail = f"worker {worker.index} has lost it: {loss.detail}"
        return _certain(missed, Loss(kind=LossKind.SILENT, detail=detail, sole=True))
    if loss.kind in STUCK and len(domain.members) > 1 and not loss.sole:
        return _uncertain(worker, loss, loss.kind)
    return _certain(worker, loss)


def explain(domain: FailureDomain, worker: WorkerRecord, exited: Loss) -> None:
    """Add to a loss by disconnection how the process exited, most likely the reason for it."""
    missed = domain.loss
    if missed is None or missed.kind is not LossKind.DISCONNECTED:
        return
    if worker.last_cause != missed.detail:
        # A sibling, which was killed because of that loss.
        return
    told = replace(exited, detail=f"{missed.detail}, {exited.detail}")
    domain.loss = told
    worker.last_cause = told.detail


def _exited_before(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> WorkerRecord | None:
    """The first worker that exited by itself, unless it is this one.

    An exit is settled only a moment after it was seen, when its last messages have been read. Ranks
    that have lost that peer may report it, and even exit, before that.
    """
    for index, status in domain.exits.items():
        if index == worker.index and loss.failure is not FailureKind.PEER_LOST:
            return None
        if index != worker.index and failure_of(status) is not FailureKind.PEER_LOST:
            return _member(domain, index)
    return None


def _lost_peer(loss: Loss) -> bool:
    return loss.failure is FailureKind.PEER_LOST


def _worker(domain: FailureDomain, index: int) -> WorkerRecord:
    return next(member for member in domain.members if member.index == index)


def _member(domain: FailureDomain, index: int | None) -> WorkerRecord | None:
    return next((member for member in domain.members if member.index == index), None)


def _certain(worker: WorkerRecord, loss: Loss) -> Blame:
    sibling = Loss(kind=LossKind.SIBLING, detail=f"worker {worker.index}: {loss.detail}")
    return Blame(worker=worker, loss=loss, certain=True, others=sibling)


def _uncertain(worker: WorkerRecord, loss: Loss, others: LossKind) -> Blame:
    detail = f"worker {worker.index}: {loss.detail}"
    return Blame(worker=worker, loss=loss, certain=False, others=Loss(kind=others, detail=detail))


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start the members of the domain again, not before this time."""

    time: float


@dataclass(frozen=True, slots=True)
class StayDown:
    """A restart cannot help, for this reason."""

    loss: Loss


def recover(
    domain: FailureDomain, loss: Loss, limits: RestartLimits, rng: random.Random, now: float
) -> RestartAt | StayDown:
    """Decide what follows, and take a restart out of the budget of the domain."""
    if loss.kind is LossKind.RESTART or ExitCode.HOST_LOST in domain.exits.values():
        # The worker did nothing wrong: this costs no budget, and needs no delay. If its machine
        # was lost, the next start waits for another one anyway.
        domain.ready_since = None
        return RestartAt(now)
    if _is_final(domain, loss):
        return StayDown(loss)
    healthy_s = 0.0 if domain.ready_since is None else now - domain.ready_since
    domain.ready_since = None
    if not domain.budget.allow(now):
        detail = f"{loss.detail} ({limits.max_restarts} restarts did not help)"
        return StayDown(Loss(kind=loss.kind, detail=detail, failure=FailureKind.INTERNAL))
    delay = domain.back_off.delay(healthy_s, rng)
    for member in domain.members:
        _logger.info("worker %s: restarts in %.2f s, %s", member.index, delay, member.tag)
    return RestartAt(now + delay)


def hopeless(
    domains: Iterable[FailureDomain], domain: FailureDomain, loss: Loss
) -> list[FailureDomain]:
    """The domains that fail for good when this one does."""
    everyone = [*domains]
    if loss.final and not any(member.ready_once for each in everyone for member in each.members):
        # All workers are configured alike: the others would fail the same way later.
        return everyone
    return [domain]


def give_up(domain: FailureDomain, loss: Loss, now: float) -> list[GiveUp]:
    """Mark every member as failed for good."""
    # A member that waited for its restart must not be started any more.
    domain.restart_at = None
    steps: list[GiveUp] = []
    for member in domain.members:
        if member.status is WorkerStatus.FAILED:
            continue
        member.move(WorkerStatus.FAILED, now)
        member.message = member.last_cause = loss.detail
        _logger.error("worker %s: failed for good, %s: %s", member.index, member.tag, loss.detail)
        steps.append(GiveUp(member.index, loss))
    return steps


def _is_final(domain: FailureDomain, loss: Loss) -> bool:
    """Whether a restart would fail again. Memory that was enough once may be enough again."""
    # Another machine may take the place, and have what this one lacks.
    if not loss.final or domain.remote:
        return False
    ready_once = any(member.ready_once for member in domain.members)
    return not (ready_once and loss.failure is FailureKind.OUT_OF_MEMORY)
