"""Event dispatch: every event of a worker goes to the part that handles it."""

from typing import Final, assert_never

from mlx_dp.orchestrator.control.requests.worker_events import WorkerEvents
from mlx_dp.orchestrator.control.routing.rank import Owner, RankTable
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.workers.actions import Loss
from mlx_dp.orchestrator.control.workers.fleet import Fleet
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.protocol import (
    Accepted,
    Failed,
    Finished,
    Flushed,
    Heartbeat,
    Hello,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    Tokens,
    Up,
)


class EventDispatch:
    """Hands each event of a worker to the part that handles it.

    A worker that breaks the protocol is lost, and so replaced.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        fleet: Fleet,
        ranks: RankTable,
        worker_events: WorkerEvents,
        counters: Counters,
    ) -> None:
        self._supervisor: Final = supervisor
        self._fleet: Final = fleet
        self._ranks: Final = ranks
        self._worker_events: Final = worker_events
        self._counters: Final = counters

    def handle(self, identity: str, event: Up | ProtocolError, now: float) -> None:
        """Handle one event. Those of an incarnation that was given up are dropped."""
        index = self._fleet.index_of(identity)
        if index is None:
            self._counters.stale_events += 1
            return
        try:
            if isinstance(event, ProtocolError):
                self._counters.malformed_frames += 1
                raise event
            self._handle(index, event, now)
        except ProtocolError as error:
            self._counters.protocol_errors += 1
            loss = Loss(kind=LossKind.PROTOCOL, detail=str(error))
            self._fleet.carry_out(self._supervisor.lost(index, loss, now), now)

    def _handle(self, index: int, event: Up, now: float) -> None:
        events = self._worker_events
        match event:
            case Tokens():
                owner = self._owner(index, event.tag)
                owner.heartbeats.progressed(now)
                events.tokens(owner, event, now)
            case Accepted():
                events.accepted(self._heard(index, event.tag, now), event)
            case Prefilled():
                events.prefilled(self._heard(index, event.tag, now), event)
            case Finished():
                events.finished(self._heard(index, event.tag, now), event, now)
            case Preempted():
                events.preempted(self._heard(index, event.tag, now), event, now)
            case Rejected():
                events.rejected(self._heard(index, event.tag, now), event, now)
            case Flushed():
                events.flushed(self._heard(index, event.tag, now), event)
            case Heartbeat():
                self._heartbeat(index, event, now)
            case Hello():
                self._fleet.carry_out(self._supervisor.greeted(index, now), now)
            case Ready():
                self._fleet.ready(index, event, now)
            case Failed():
                self._fleet.carry_out(self._supervisor.failed(index, event, now), now)
            case _:
                assert_never(event)

    def _owner(self, index: int, tag: str) -> Owner:
        owner = self._ranks.get(index)
        if owner is None:
            raise ProtocolError(f"worker {index}: {tag} before it was ready")
        return owner

    def _heard(self, index: int, tag: str, now: float) -> Owner:
        owner = self._owner(index, tag)
        owner.heartbeats.heard(now)
        return owner

    def _heartbeat(self, index: int, heartbeat: Heartbeat, now: float) -> None:
        self._fleet.on_heartbeat(index, heartbeat)
        self._supervisor.heard(index, heartbeat.phase, now)
        owner = self._ranks.get(index)
        if owner is None:
            return
        # Messages arrive in the order in which they were sent, so the report of an end was lost.
        accepted = len(owner.grants) - len(owner.unaccepted)
        if heartbeat.running < accepted:
            raise ProtocolError(f"worker {index}: runs {heartbeat.running} of {accepted} requests")
        owner.on_heartbeat(heartbeat, now)
