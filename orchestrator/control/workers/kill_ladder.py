"""Kill ladder: a lost worker is asked to exit or to dump its stacks, and then gets SIGKILL."""

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import (
    Action,
    Dismiss,
    DumpStacks,
    Kill,
    Loss,
    RemoveOwner,
)
from mlx_dp.orchestrator.control.workers.record import ALIVE, WorkerRecord
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.events import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KillLimits:
    """Seconds to SIGKILL: from the stack dump, from ``Failed``, and from ``Shutdown``."""

    abort_grace_s: float = 1.0
    exit_grace_s: float = 2.0
    dismiss_grace_s: float = 5.0


def mark_lost(
    worker: WorkerRecord, loss: Loss, limits: KillLimits, *, culprit: bool, now: float
) -> list[Action]:
    """Give up a worker and begin to end its process; no actions when it was lost before."""
    if worker.status not in ALIVE:
        return []
    actions: list[Action] = []
    if worker.identity:
        actions.append(RemoveOwner(worker.index, worker.identity, loss, culprit))
    worker.change_status(WorkerStatus.LOST, now)
    worker.message = worker.last_cause = loss.detail
    if not worker.has_process:
        return actions
    match loss.kind:
        case LossKind.EXIT if loss.failure is not FailureKind.PEER_LOST:
            worker.kill_at = now + limits.exit_grace_s
        case LossKind.RESTART:
            actions.append(Dismiss(worker.index, worker.identity))
            worker.kill_at = now + limits.dismiss_grace_s
        case (
            LossKind.HUNG
            | LossKind.SILENT
            | LossKind.START_TIMEOUT
            | LossKind.NOT_ACCEPTED
            | LossKind.NOT_RELEASED
        ):
            # A stuck worker reports no reason, but its fault handler shows where it is.
            actions.append(DumpStacks(worker.index, worker.identity))
            worker.kill_at = now + limits.abort_grace_s
        case _:
            # A worker that lost a peer may wait for it in a collective for ever, even at its exit.
            actions.append(Kill(worker.index, worker.identity))
    return actions


def shorten_grace(
    members: tuple[WorkerRecord, ...], limits: KillLimits, *, stopping: bool, now: float
) -> None:
    """Shorten the grace of a group that was asked to exit: without the lost rank it may be stuck.

    ``stopping``: all ranks were asked to exit.
    """
    due = now + limits.abort_grace_s
    for member in members:
        if member.kill_at is not None:
            member.kill_at = min(due, member.kill_at)
        elif stopping and member.has_process:
            member.kill_at = due


def due_kills(workers: Iterable[WorkerRecord], now: float) -> list[Action]:
    """Kill the processes that have not exited in time."""
    actions: list[Action] = []
    for worker in workers:
        if worker.kill_at is not None and worker.kill_at <= now:
            worker.kill_at = None
            actions.append(Kill(worker.index, worker.identity))
    return actions
