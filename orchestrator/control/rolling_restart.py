"""Restarts that were asked for: one failure domain after another, so that others can serve."""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.control.actions import Action
from mlx_dp.orchestrator.control.rank import RankTable
from mlx_dp.orchestrator.control.record import WorkerRecord
from mlx_dp.orchestrator.control.supervisor import Supervisor
from mlx_dp.orchestrator.worker_states import RestartRefusedError, WorkerStatus

_logger = logging.getLogger(__name__)

_SETTLED: Final = (WorkerStatus.READY, WorkerStatus.FAILED)


def _settled(worker: WorkerRecord) -> bool:
    """Whether it is not worth waiting for: it is there, or nobody knows when it will be."""
    return worker.status in _SETTLED or worker.unplaced


@dataclass(slots=True)
class _Turn:
    """One group of workers that is to be replaced, by the identities that are to go."""

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

    def all(self, status: WorkerStatus) -> bool:
        return all(member.status is status for member in self.members)


class RollingRestart:
    """Gives each group its turn once all others are settled, and stops where one fails for good.

    What a group has in hand is continued by the others. One that is alone finishes what it can
    within ``drain_s``; the rest, and whatever is asked meanwhile, waits for its successor.
    """

    def __init__(self, supervisor: Supervisor, ranks: RankTable, *, drain_s: float) -> None:
        self._supervisor: Final = supervisor
        self._ranks: Final = ranks
        self._drain_s: Final = drain_s
        self._pending: Final[deque[_Turn]] = deque()
        self._turn: _Turn | None = None
        self._stopped = False

    @property
    def under_way(self) -> bool:
        return self._turn is not None or bool(self._pending)

    @property
    def holds_all(self) -> bool:
        """Whether there is nobody to serve until a successor is ready."""
        turn = self._turn
        return turn is not None and not turn.all(WorkerStatus.READY) and self._alone(turn)

    def replaces(self, index: int) -> bool:
        """Whether this worker is on its way out, or its successor on its way in."""
        turn = self._turn
        return (
            turn is not None
            and index in turn.indices
            and self._supervisor.workers[index].status is not WorkerStatus.FAILED
        )

    def concerns(self, index: int) -> bool:
        """Whether a restart of this worker is still to come, or under way."""
        turns = [*self._pending, *([] if self._turn is None else [self._turn])]
        return any(index in turn.indices for turn in turns)

    def ask(self, index: int) -> tuple[int, ...]:
        """Have a worker replaced, and its whole group with it; return whom that concerns.

        Raises RestartRefusedError.
        """
        self._refuse()
        members = self._supervisor.domains.of(index).members
        for member in members:
            if member.status is not WorkerStatus.READY:
                raise RestartRefusedError(f"worker {member.index} is {member.status.value}")
        return self._plan([members])

    def ask_all(self) -> tuple[int, ...]:
        """Have every group replaced that is ready; return whom that concerns.

        Raises RestartRefusedError.
        """
        self._refuse()
        ready = [domain.members for domain in self._supervisor.domains if domain.ready]
        if not ready:
            raise RestartRefusedError("no worker is ready")
        return self._plan(ready)

    def _refuse(self) -> None:
        if self._stopped:
            raise RestartRefusedError("the service is shutting down")
        if self.under_way:
            raise RestartRefusedError("a restart is under way already")

    def _plan(self, groups: Iterable[tuple[WorkerRecord, ...]]) -> tuple[int, ...]:
        for members in groups:
            self._pending.append(_Turn(members, tuple(member.identity for member in members)))
        indices = tuple(member.index for turn in self._pending for member in turn.members)
        _logger.info("workers %s: a restart was asked for", ", ".join(map(str, indices)))
        return indices

    def tick(self, now: float) -> list[Action]:
        """Go on, as far as it is time to."""
        turn = self._turn
        if turn is None:
            return self._begin_next(now)
        if any(member.status is WorkerStatus.FAILED for member in turn.members):
            _logger.error("the restart that was asked for ends here: a successor has failed")
            self._turn = None
            self._pending.clear()
        elif any(member.unplaced for member in turn.members):
            _logger.warning("a restart that was asked for waits for a machine: others go on")
            self._turn = None
            return self._begin_next(now)
        elif turn.replaced and turn.all(WorkerStatus.READY):
            self._turn = None
            return self._begin_next(now)
        elif turn.all(WorkerStatus.DRAINING) and (now >= turn.drain_until or self._idle(turn)):
            return self._supervisor.retire(turn.members[0].index, now)
        return []

    def _begin_next(self, now: float) -> list[Action]:
        # Whoever is down or loads will be back: to take another one down now would leave fewer.
        if not all(_settled(worker) for worker in self._supervisor.workers):
            return []
        while self._pending:
            turn = self._pending.popleft()
            if turn.replaced or not turn.all(WorkerStatus.READY):
                continue
            self._turn = turn
            turn.drain_until = now + self._drain_s if self._alone(turn) else now
            return self._supervisor.drain(turn.members[0].index, now)
        return []

    def _alone(self, turn: _Turn) -> bool:
        return all(owner.index in turn.indices for owner in self._ranks.owners())

    def _idle(self, turn: _Turn) -> bool:
        owners = (self._ranks.get(index) for index in turn.indices)
        return not any(owner is not None and owner.grants for owner in owners)

    def stop(self) -> None:
        """The service ends: nobody is replaced any more."""
        self._stopped = True
        self._pending.clear()
        self._turn = None
