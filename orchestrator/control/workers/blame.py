"""Blame: which worker of a failure domain failed first, so that the others are not blamed."""

from dataclasses import dataclass, replace

from mlx_dp.orchestrator.control.workers.actions import STUCK, Loss
from mlx_dp.orchestrator.control.workers.record import FailureDomain, WorkerRecord
from mlx_dp.orchestrator.control.workers.stalled_rank import chain_end
from mlx_dp.orchestrator.exit_status import describe_exit, failure_of
from mlx_dp.orchestrator.worker_states import LossKind
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

    This holds for a loss that only reports a missing peer or connection: the other ranks may notice
    an exit before the system reports it. The exit of a worker that has itself lost a peer explains
    nothing.
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
