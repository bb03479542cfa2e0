"""Makes the state that the metadata routes show, from values that are at hand."""

from collections import Counter
from typing import Final

from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.fleet import Fleet
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.rolling_restart import RollingRestart
from mlx_dp.orchestrator.control.supervisor import Supervisor
from mlx_dp.orchestrator.control.worker_record import WorkerRecord
from mlx_dp.orchestrator.service import OwnerState

RATE_WINDOW_S: Final = 2.0


class TokenRates:
    """Tokens per second of each owner, over the last full window."""

    def __init__(self, generated: Counter[int]) -> None:
        self._generated: Final = generated
        self._rates: Final[dict[int, float]] = {}
        self._before: Final[Counter[int]] = Counter()
        self._since: float | None = None

    def roll(self, now: float) -> None:
        """Close the window once it is full."""
        if self._since is None:
            self._since = now
        elapsed = now - self._since
        if elapsed < RATE_WINDOW_S:
            return
        for owner, total in self._generated.items():
            self._rates[owner] = (total - self._before[owner]) / elapsed
            self._before[owner] = total
        self._since = now

    def rate(self, owner: int) -> float:
        return self._rates.get(owner, 0.0)


class ServiceView:
    """One ``OwnerState`` per worker. An owner that is not ready holds nothing."""

    def __init__(
        self,
        supervisor: Supervisor,
        fleet: Fleet,
        book: OwnerBook,
        restarts: RollingRestart,
        rates: TokenRates,
        tally: Tally,
    ) -> None:
        self._supervisor: Final = supervisor
        self._fleet: Final = fleet
        self._book: Final = book
        self._restarts: Final = restarts
        self._rates: Final = rates
        self._tally: Final = tally

    def owners(self) -> tuple[OwnerState, ...]:
        return tuple(self._owner(worker) for worker in self._supervisor.workers)

    def _owner(self, worker: WorkerRecord) -> OwnerState:
        owner = self._book.get(worker.index)
        beat = self._fleet.beat_of(worker.index)
        return OwnerState(
            owner=worker.index,
            status=worker.status,
            pid=worker.pid,
            incarnation=worker.incarnation,
            restarts=worker.restarts,
            capacity=None if owner is None else owner.ready.capacity,
            shape=None if owner is None else owner.ready.shape,
            context_length=None if owner is None else owner.ready.context_length,
            device="" if owner is None else owner.ready.device,
            running=0 if owner is None else len(owner.leases),
            prefilling=0 if owner is None else owner.prefilling,
            used_tokens=0 if owner is None else owner.held_tokens,
            reserved_tokens=0 if owner is None else owner.reserved_tokens,
            auxiliary_used=0 if beat is None or owner is None else beat.auxiliary_used,
            rss_nbytes=0 if beat is None else beat.rss_nbytes,
            device_nbytes=0 if beat is None else beat.device_nbytes,
            prefix_tokens=0 if beat is None or owner is None else beat.cached_tokens,
            prefix_nbytes=0 if beat is None or owner is None else beat.cached_nbytes,
            held_nbytes=0 if beat is None or owner is None else beat.held_nbytes,
            held_buffers=0 if beat is None or owner is None else beat.held_buffers,
            buffer_limit=None if owner is None else owner.ready.buffer_limit,
            step=0 if beat is None else beat.step,
            prompt_tokens_total=self._tally.prompt_by_owner[worker.index],
            cached_tokens_total=self._tally.cached_by_owner[worker.index],
            generated_tokens_total=self._tally.generated_by_owner[worker.index],
            preemptions_total=self._tally.preempted_by_owner[worker.index],
            generation_tokens_per_s=self._rates.rate(worker.index),
            phase=worker.status.value if beat is None else beat.phase.value,
            message=worker.message,
            restarting=self._restarts.replaces(worker.index),
            overdue=owner is not None and owner.overdue,
            passes=None if beat is None else beat.passes,
            batching=None if owner is None else owner.ready.batching,
        )
