"""Whose fault a loss is. Ranks that wait for each other fail together, and one of them began."""

from dataclasses import dataclass, replace

from mlx_dp.orchestrator.control.supervisor_steps import STUCK, Loss, LossKind
from mlx_dp.orchestrator.control.worker_record import FailureDomain, WorkerRecord
from mlx_dp.orchestrator.process.exit_status import describe_exit, failure_of
from mlx_dp.proto.messages import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """``worker`` is named for the loss of its domain; ``certain``: it is its own fault.

    ``others`` is what the rest of the domain is lost by.
    """

    worker: WorkerRecord
    loss: Loss
    certain: bool
    others: Loss


def blame(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> Blame:
    """Say who began, when this worker is the first to be given up."""
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
    """Say how a process ended that had only been missed: most likely, that had cut it off."""
    missed = domain.loss
    if missed is None or missed.kind is not LossKind.DISCONNECTED:
        return
    if worker.last_cause != missed.detail:
        # A sibling, which was ended for it.
        return
    told = replace(exited, detail=f"{missed.detail}, {exited.detail}")
    if domain.first_loss is missed:
        domain.first_loss = told
    domain.loss = told
    worker.last_cause = told.detail


def _exited_before(domain: FailureDomain, worker: WorkerRecord, loss: Loss) -> WorkerRecord | None:
    """The first that has exited by itself, if this worker is not that one.

    An exit that was seen is settled only a moment later, when its last messages have been read;
    those that have lost a peer may say so, and even exit, before that.
    """
    for index, status in domain.exits.items():
        if index == worker.index and loss.failure is not FailureKind.PEER_LOST:
            return None
        if index != worker.index and failure_of(status) is not FailureKind.PEER_LOST:
            return _member(domain, index)
    return None


def _member(domain: FailureDomain, index: int | None) -> WorkerRecord | None:
    return next((member for member in domain.members if member.index == index), None)


def _certain(worker: WorkerRecord, loss: Loss) -> Blame:
    sibling = Loss(kind=LossKind.SIBLING, detail=f"worker {worker.index}: {loss.detail}")
    return Blame(worker=worker, loss=loss, certain=True, others=sibling)


def _uncertain(worker: WorkerRecord, loss: Loss, others: LossKind) -> Blame:
    detail = f"worker {worker.index}: {loss.detail}"
    return Blame(worker=worker, loss=loss, certain=False, others=Loss(kind=others, detail=detail))
