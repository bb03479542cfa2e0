"""State views: snapshots of owners and workers for the metadata routes."""

from collections import Counter
from typing import Final

from mlx_dp.orchestrator.api import OwnerState
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.workers.fleet import Fleet
from mlx_dp.orchestrator.control.workers.record import WorkerRecord
from mlx_dp.orchestrator.control.workers.rolling_restart import RollingRestart
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor
from mlx_dp.orchestrator.worker_states import WorkerState

RATE_WINDOW_S: Final = 2.0


class TokenRates:
    """Tokens per second of each owner, over the last full window."""

    def __init__(self, generated: Counter[int]) -> None:
        self._generated: Final = generated
        self._rates: Final[dict[int, float]] = {}
        self._before: Final[Counter[int]] = Counter()
        self._since: float | None = None

    def update(self, now: float) -> None:
        """Start a new window when the present one is full."""
        if self._since is None:
            self._since = now
        elapsed = now - self._since
        if elapsed < RATE_WINDOW_S:
            return
        for dp_rank, total in self._generated.items():
            self._rates[dp_rank] = (total - self._before[dp_rank]) / elapsed
            self._before[dp_rank] = total
        self._since = now

    def rate(self, dp_rank: int) -> float:
        return self._rates.get(dp_rank, 0.0)


class StateViews:
    """Makes an ``OwnerState`` and a ``WorkerState`` of each worker from its present state."""

    def __init__(
        self,
        supervisor: Supervisor,
        fleet: Fleet,
        ranks: RankTable,
        restarts: RollingRestart,
        counters: Counters,
    ) -> None:
        self._supervisor: Final = supervisor
        self._fleet: Final = fleet
        self._ranks: Final = ranks
        self._restarts: Final = restarts
        self._counters: Final = counters
        self._rates: Final = TokenRates(counters.generated_by_owner)

    def update_rates(self, now: float) -> None:
        """Update the token rates."""
        self._rates.update(now)

    def owners(self) -> tuple[OwnerState, ...]:
        return tuple(self._owner(worker) for worker in self._supervisor.workers)

    def workers(self, now: float) -> tuple[WorkerState, ...]:
        return tuple(self._worker(worker, now) for worker in self._supervisor.workers)

    def _owner(self, worker: WorkerRecord) -> OwnerState:
        owner = self._ranks.get(worker.index)
        heartbeat = self._fleet.heartbeat_of(worker.index)
        return OwnerState(
            dp_rank=worker.index,
            status=worker.status,
            pid=worker.pid,
            incarnation=worker.incarnation,
            restarts=worker.restarts,
            capacity=None if owner is None else owner.ready.capacity,
            shape=None if owner is None else owner.ready.shape,
            context_length=None if owner is None else owner.ready.context_length,
            device="" if owner is None else owner.ready.device,
            running=0 if owner is None else len(owner.grants),
            prefilling=0 if owner is None else owner.prefilling,
            used_tokens=0 if owner is None else owner.held_tokens,
            reserved_tokens=0 if owner is None else owner.reserved_tokens,
            auxiliary_used=0 if heartbeat is None or owner is None else heartbeat.auxiliary_used,
            rss_nbytes=0 if heartbeat is None else heartbeat.rss_nbytes,
            device_nbytes=0 if heartbeat is None else heartbeat.device_nbytes,
            prefix_tokens=0 if heartbeat is None or owner is None else heartbeat.cached_tokens,
            prefix_nbytes=0 if heartbeat is None or owner is None else heartbeat.cached_nbytes,
            held_nbytes=0 if heartbeat is None or owner is None else heartbeat.held_nbytes,
            held_buffers=0 if heartbeat is None or owner is None else heartbeat.held_buffers,
            buffer_limit=None if owner is None else owner.ready.buffer_limit,
            step=0 if heartbeat is None else heartbeat.step,
            prompt_tokens_total=self._counters.prompt_by_owner[worker.index],
            cached_tokens_total=self._counters.cached_by_owner[worker.index],
            generated_tokens_total=self._counters.generated_by_owner[worker.index],
            preemptions_total=self._counters.preempted_by_owner[worker.index],
            generation_tokens_per_s=self._rates.rate(worker.index),
            phase=worker.status.value if heartbeat is None else heartbeat.phase.value,
            message=worker.message,
            restarting=self._restarts.is_replacing(worker.index),
            overdue=owner is not None and owner.overdue,
            passes=None if heartbeat is None else heartbeat.passes,
            batching=None if owner is None else owner.ready.batching,
        )

    def _worker(self, worker: WorkerRecord, now: float) -> WorkerState:
        heartbeat = self._fleet.heartbeat_of(worker.index)
        owner = self._ranks.get(worker.index)
        budget = self._supervisor.domains.domain_of(worker.index).budget
        return WorkerState(
            index=worker.index,
            status=worker.status,
            status_s=now - worker.since,
            phase=worker.status.value if heartbeat is None else heartbeat.phase.value,
            pid=worker.pid if worker.has_process else None,
            incarnation=worker.incarnation,
            epoch=worker.epoch,
            restarts=worker.restarts,
            restarts_in_window=budget.used(now),
            max_restarts=budget.limit,
            last_cause=worker.last_cause,
            restart_asked=self._restarts.includes(worker.index),
            malformed_frames=0 if heartbeat is None else heartbeat.malformed_frames,
            host=worker.host,
            batching=None if owner is None else owner.ready.batching,
            unbatched_reason="" if owner is None else owner.ready.unbatched_reason,
        )
