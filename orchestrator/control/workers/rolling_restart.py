"""Rolling restart: replaces one failure domain after another, while the others serve."""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.workers.actions import Action
from mlx_dp.orchestrator.control.workers.record import WorkerRecord
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor
from mlx_dp.orchestrator.worker_states import RestartRefusedError, WorkerStatus

_logger = logging.getLogger(__name__)

_SETTLED: Final = (WorkerStatus.READY, WorkerStatus.FAILED)


def _settled(worker: WorkerRecord) -> bool:
    """Whether a restart need not wait for this worker: it is ready, failed, or has no machine."""
    return worker.status in _SETTLED or worker.unplaced


@dataclass(slots=True)
class _Replacement:
    """One group of workers to replace, and the identities of its present incarnations."""

    members: tuple[WorkerRecord, ...]
    identities: tuple[str, ...]
    drain_until: float = 0.0

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(member.index for member in self.members)

    @property
    def replaced(self) -> bool:
        return all(
            member.identity != identity
            for member, identity in zip(self.members, self.identities, strict=True)
        )

    def all_are(self, status: WorkerStatus) -> bool:
        return all(member.status is status for member in self.members)


class RollingRestart:
    """Replaces one group of workers at a time, while all others are settled.

    The other groups continue the requests of the group that is replaced. If there are no others, it
    finishes what it can within ``drain_s``; the rest, and new requests, wait for its successor. If
    a successor fails for good, the rolling restart ends.
    """

    def __init__(self, supervisor: Supervisor, ranks: RankTable, *, drain_s: float) -> None:
        self._supervisor: Final = supervisor
        self._ranks: Final = ranks
        self._drain_s: Final = drain_s
        self._pending: Final[deque[_Replacement]] = deque()
        self._current: _Replacement | None = None
        self._stopped = False

    @property
    def under_way(self) -> bool:
        return self._current is not None or bool(self._pending)

    @property
    def no_owner_serves(self) -> bool:
        """Whether no owner can serve until a successor is ready."""
        current = self._current
        return (
            current is not None and not current.all_are(WorkerStatus.READY) and self._alone(current)
        )

    def is_replacing(self, index: int) -> bool:
        """Whether this worker is being replaced at the moment."""
        current = self._current
        return (
            current is not None
            and index in current.indices
            and self._supervisor.workers[index].status is not WorkerStatus.FAILED
        )

    def includes(self, index: int) -> bool:
        """Whether a restart of this worker is pending or under way."""
        replacements = [*self._pending, *([] if self._current is None else [self._current])]
        return any(index in replacement.indices for replacement in replacements)

    def request(self, index: int) -> tuple[int, ...]:
        """Replace a worker and its whole group soon; return the indices of those workers.

        Raises RestartRefusedError.
        """
        self._raise_if_refused()
        members = self._supervisor.domains.domain_of(index).members
        for member in members:
            if member.status is not WorkerStatus.READY:
                raise RestartRefusedError(f"worker {member.index} is {member.status.value}")
        return self._enqueue([members])

    def request_all(self) -> tuple[int, ...]:
        """Replace every ready group, one after another; return the indices of those workers.

        Raises RestartRefusedError.
        """
        self._raise_if_refused()
        ready = [domain.members for domain in self._supervisor.domains if domain.all_ready]
        if not ready:
            raise RestartRefusedError("no worker is ready")
        return self._enqueue(ready)

    def _raise_if_refused(self) -> None:
        if self._stopped:
            raise RestartRefusedError("the service is shutting down")
        if self.under_way:
            raise RestartRefusedError("a restart is under way already")

    def _enqueue(self, groups: Iterable[tuple[WorkerRecord, ...]]) -> tuple[int, ...]:
        for members in groups:
            self._pending.append(
                _Replacement(members, tuple(member.identity for member in members))
            )
        indices = tuple(member.index for each in self._pending for member in each.members)
        _logger.info("workers %s: a restart was requested", ", ".join(map(str, indices)))
        return indices

    def tick(self, now: float) -> list[Action]:
        """Continue the restart, as far as it can."""
        current = self._current
        if current is None:
            return self._begin_next(now)
        if any(member.status is WorkerStatus.FAILED for member in current.members):
            _logger.error("the rolling restart has stopped: a restarted worker failed for good")
            self._current = None
            self._pending.clear()
        elif any(member.unplaced for member in current.members):
            _logger.warning("a worker waits for a machine: the restart continues with the others")
            self._current = None
            return self._begin_next(now)
        elif current.replaced and current.all_are(WorkerStatus.READY):
            self._current = None
            return self._begin_next(now)
        elif self._drained(current, now):
            return self._supervisor.retire(current.members[0].index, now)
        return []

    def _begin_next(self, now: float) -> list[Action]:
        # A worker that is down or loading will be back: replacing another now would leave fewer.
        if not all(_settled(worker) for worker in self._supervisor.workers):
            return []
        while self._pending:
            current = self._pending.popleft()
            if current.replaced or not current.all_are(WorkerStatus.READY):
                continue
            self._current = current
            current.drain_until = now + self._drain_s if self._alone(current) else now
            return self._supervisor.drain(current.members[0].index, now)
        return []

    def _alone(self, current: _Replacement) -> bool:
        return all(owner.dp_rank in current.indices for owner in self._ranks.owners())

    def _drained(self, current: _Replacement, now: float) -> bool:
        late = now >= current.drain_until
        return current.all_are(WorkerStatus.DRAINING) and (late or self._idle(current))

    def _idle(self, current: _Replacement) -> bool:
        owners = (self._ranks.get(index) for index in current.indices)
        return not any(owner is not None and owner.grants for owner in owners)

    def stop(self) -> None:
        """Replace no further worker: the service ends."""
        self._stopped = True
        self._pending.clear()
        self._current = None
