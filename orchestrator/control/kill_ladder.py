"""How a lost worker's process is ended: by its own exit, after a stack dump, or at once."""

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_dp.orchestrator.control.supervisor_steps import (
    Abort,
    Dismiss,
    Instruction,
    Kill,
    Loss,
    LossKind,
    RemoveOwner,
)
from mlx_dp.orchestrator.control.worker_record import ALIVE, WorkerRecord
from mlx_dp.orchestrator.service import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class KillLimits:
    """Seconds to SIGKILL: from the stack dump, from ``Failed``, and from ``Shutdown``."""

    abort_grace_s: float = 1.0
    exit_grace_s: float = 2.0
    dismiss_grace_s: float = 5.0


def lose(
    worker: WorkerRecord, loss: Loss, limits: KillLimits, *, culprit: bool, now: float
) -> list[Instruction]:
    """Stop hearing a worker, and begin to end its process; nothing when it was lost before."""
    if worker.status not in ALIVE:
        return []
    steps: list[Instruction] = []
    if worker.identity:
        steps.append(RemoveOwner(worker.index, worker.identity, loss, culprit))
    worker.move(WorkerStatus.LOST, now)
    worker.message = worker.last_cause = loss.detail
    if not worker.process:
        return steps
    match loss.kind:
        case LossKind.EXIT:
            worker.kill_at = now + limits.exit_grace_s
        case LossKind.RESTART:
            steps.append(Dismiss(worker.index, worker.identity))
            worker.kill_at = now + limits.dismiss_grace_s
        case LossKind.HUNG | LossKind.SILENT:
            # It cannot say what it does: its fault handler can.
            steps.append(Abort(worker.index, worker.identity))
            worker.kill_at = now + limits.abort_grace_s
        case _:
            steps.append(Kill(worker.index, worker.identity))
    return steps


def due_kills(workers: Iterable[WorkerRecord], now: float) -> list[Instruction]:
    """Kill who has not ended by itself in time."""
    steps: list[Instruction] = []
    for worker in workers:
        if worker.kill_at is not None and worker.kill_at <= now:
            worker.kill_at = None
            steps.append(Kill(worker.index, worker.identity))
    return steps
