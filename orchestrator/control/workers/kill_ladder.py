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
from mlx_dp.proto.messages.protocol import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KillLimits:
    """Seconds to SIGKILL: from the stack dump, from ``Failed``, and from ``Shutdown``."""

    abort_grace_s: float = 1.0
    exit_grace_s: float = 2.0
    dismiss_grace_s: float = 5.0


def lose(
    worker: WorkerRecord, loss: Loss, limits: KillLimits, *, culprit: bool, now: float
) -> list[Action]:
    """Give up a worker and begin to end its process; no actions when it was lost before."""
    if worker.status not in ALIVE:
        return []
    steps: list[Action] = []
    if worker.identity:
        steps.append(RemoveOwner(worker.index, worker.identity, loss, culprit))
    worker.move(WorkerStatus.LOST, now)
    worker.message = worker.last_cause = loss.detail
    if not worker.process:
        return steps
    match loss.kind:
        case LossKind.EXIT if loss.failure is not FailureKind.PEER_LOST:
            worker.kill_at = now + limits.exit_grace_s
        case LossKind.RESTART:
            steps.append(Dismiss(worker.index, worker.identity))
            worker.kill_at = now + limits.dismiss_grace_s
        case (
            LossKind.HUNG
            | LossKind.SILENT
            | LossKind.START_TIMEOUT
            | LossKind.NOT_ACCEPTED
            | LossKind.NOT_RELEASED
        ):
            # It does not say why it is stuck: its fault handler shows where it is.
            steps.append(DumpStacks(worker.index, worker.identity))
            worker.kill_at = now + limits.abort_grace_s
        case _:
            # One that lost a peer may wait for it in a collective for ever, even while exiting.
            steps.append(Kill(worker.index, worker.identity))
    return steps


def hasten(
    members: tuple[WorkerRecord, ...], limits: KillLimits, *, stopping: bool, now: float
) -> None:
    """Shorten the grace of a group that was asked to exit: without the lost rank it may be stuck.

    ``stopping``: all ranks were asked to exit.
    """
    due = now + limits.abort_grace_s
    for member in members:
        if member.kill_at is not None:
            member.kill_at = min(due, member.kill_at)
        elif stopping and member.process:
            member.kill_at = due


def due_kills(workers: Iterable[WorkerRecord], now: float) -> list[Action]:
    """Kill the processes that have not exited in time."""
    steps: list[Action] = []
    for worker in workers:
        if worker.kill_at is not None and worker.kill_at <= now:
            worker.kill_at = None
            steps.append(Kill(worker.index, worker.identity))
    return steps
