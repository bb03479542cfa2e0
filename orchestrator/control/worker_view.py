"""Makes the states of the workers that ``/workers`` shows, from values that are at hand."""

from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.control.fleet import Fleet
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.rolling_restart import RollingRestart
from mlx_dp.orchestrator.control.supervisor import Supervisor
from mlx_dp.orchestrator.control.worker_record import WorkerRecord
from mlx_dp.orchestrator.worker_states import WorkerState


class WorkerView:
    """One ``WorkerState`` per worker."""

    def __init__(
        self,
        supervisor: Supervisor,
        fleet: Fleet,
        book: OwnerBook,
        restarts: RollingRestart,
        clock: Callable[[], float],
    ) -> None:
        self._supervisor: Final = supervisor
        self._fleet: Final = fleet
        self._book: Final = book
        self._restarts: Final = restarts
        self._clock: Final = clock

    def states(self) -> tuple[WorkerState, ...]:
        now = self._clock()
        return tuple(self._state(worker, now) for worker in self._supervisor.workers)

    def _state(self, worker: WorkerRecord, now: float) -> WorkerState:
        beat = self._fleet.beat_of(worker.index)
        owner = self._book.get(worker.index)
        budget = self._supervisor.domains.of(worker.index).budget
        return WorkerState(
            index=worker.index,
            status=worker.status,
            status_s=now - worker.since,
            phase=worker.status.value if beat is None else beat.phase.value,
            pid=worker.pid if worker.process else None,
            incarnation=worker.incarnation,
            epoch=worker.epoch,
            restarts=worker.restarts,
            restarts_in_window=budget.used(now),
            max_restarts=budget.limit,
            last_cause=worker.last_cause,
            restart_asked=self._restarts.concerns(worker.index),
            malformed_frames=0 if beat is None else beat.malformed_frames,
            host=worker.host,
            batching=None if owner is None else owner.ready.batching,
            unbatched_reason="" if owner is None else owner.ready.unbatched_reason,
        )
