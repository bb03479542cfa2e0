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
from mlx_dp.proto.messages.events import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The worker that is blamed for the loss of its domain; ``certain``: the loss is its own fault.

    ``others``: the loss that is recorded for the other workers of the domain.
    """

    worker: WorkerRecord
    loss: Loss
    certain: bool
    others: Loss


def may_be_explained(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> bool:
    """Whether the cause of a loss may still arrive, as the exit of another process of its domain.

    So it is with losses that only report a missing peer or connection: peers may notice the exit of
    a process, and each other's exits, before the system reports it. The exit of a worker that has
    itself lost a peer explains nothing.
    """
    secondhand = loss.kind is LossKind.DISCONNECTED and worker.served
    if not (secondhand or _lost_peer(loss)) or _exited_before(domain, worker, loss) is not None:
        return False
    innocent = {index for index, each in domain.reports.items() if _lost_peer(each)}
    if _lost_peer(loss):
        innocent.add(worker.index)
    return len(domain.members) > 1 and any(
        member.has_process and member.index not in innocent for member in domain.members
    )


def blame_from_reports(domain: FailureDomain) -> Blame:
    """Find the worker that failed first from the held reports, which no exit has explained."""
    reports = domain.reports
    first = next(iter(reports))
    gone = [index for index, loss in reports.items() if not _lost_peer(loss)]
    waits = {index: loss.lost_rank for index, loss in reports.items() if loss.lost_rank is not None}
    ends = {chain_end(waits, index) for index in waits} - {None, *reports}
    if len(gone) == 1:
        return find_blame(domain, _worker(domain, gone[0]), reports[gone[0]])
    if not gone and len(ends) == 1:
        witness = next(index for index in waits if waits[index] in ends)
        return find_blame(domain, _worker(domain, witness), reports[witness])
    unnamed = replace(reports[first], lost_rank=None)
    return _uncertain(_worker(domain, first), unnamed, LossKind.SIBLING)


def find_blame(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> Blame:
    """Find the worker that failed first, when this one is the first to be given up."""
    exited = _exited_before(domain, worker, loss)
    if exited is not None:
        status = domain.exits[exited.index]
        cause = Loss(kind=LossKind.EXIT, detail=describe_exit(status), failure=failure_of(status))
        return _certain(exited, cause)
    if loss.failure is FailureKind.PEER_LOST:
        missed = _member(domain, loss.lost_rank)
        if missed is None or missed is worker:
            return _uncertain(worker, loss, LossKind.SIBLING)
        detail = f"worker {worker.index} has lost it: {loss.detail}"
        return _certain(missed, Loss(kind=LossKind.SILENT, detail=detail, sole=True))
    if loss.kind in STUCK and len(domain.members) > 1 and not loss.sole:
        return _uncertain(worker, loss, loss.kind)
    return _certain(worker, loss)


def add_exit(domain: FailureDomain, worker: WorkerRecord, exited: Loss) -> None:
    """Add the exit of a worker to its loss by disconnection: most likely it is the reason."""
    loss = domain.loss
    if loss is None or loss.kind is not LossKind.DISCONNECTED:
        return
    if worker.last_cause != loss.detail:
        # A sibling, which was killed because of that loss.
        return
    explained = replace(exited, detail=f"{loss.detail}, {exited.detail}")
    domain.loss = explained
    worker.last_cause = explained.detail


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


def decide_recovery(
    domain: FailureDomain, loss: Loss, limits: RestartLimits, rng: random.Random, now: float
) -> RestartAt | StayDown:
    """Decide whether to restart the domain; a restart is charged to its budget."""
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


def domains_given_up(
    domains: Iterable[FailureDomain], domain: FailureDomain, loss: Loss
) -> list[FailureDomain]:
    """Return the domains that fail for good when this one does."""
    all_domains = [*domains]
    if loss.final and not any(member.ready_once for each in all_domains for member in each.members):
        # All workers are configured alike: the others would fail the same way later.
        return all_domains
    return [domain]


def mark_failed(domain: FailureDomain, loss: Loss, now: float) -> list[GiveUp]:
    """Mark every member as failed for good."""
    # A member that waited for its restart must not be started any more.
    domain.restart_at = None
    actions: list[GiveUp] = []
    for member in domain.members:
        if member.status is WorkerStatus.FAILED:
            continue
        member.change_status(WorkerStatus.FAILED, now)
        member.message = member.last_cause = loss.detail
        _logger.error("worker %s: failed for good, %s: %s", member.index, member.tag, loss.detail)
        actions.append(GiveUp(member.index, loss))
    return actions


def _is_final(domain: FailureDomain, loss: Loss) -> bool:
    """Whether a restart would fail again. Memory that was enough once may be enough again."""
    # Another machine may take the place, and have what this one lacks.
    if not loss.final or domain.any_remote:
        return False
    ready_once = any(member.ready_once for member in domain.members)
    return not (ready_once and loss.failure is FailureKind.OUT_OF_MEMORY)
