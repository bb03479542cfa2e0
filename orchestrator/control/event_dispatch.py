"""Event dispatch: hands events of workers to the parts that handle them."""

from typing import Final, assert_never

from mlx_dp.orchestrator.control.requests.worker_events import WorkerEvents
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.owner import Owner
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.workers.actions import Loss
from mlx_dp.orchestrator.control.workers.fleet import Fleet
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import (
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
    """Hands each event of a worker to its handler.

    A worker that violates the protocol counts as lost, so it is replaced.
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
        """Handle one event; drop it if it comes from an incarnation that was given up."""
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
            self._fleet.carry_out(self._supervisor.on_loss(index, loss, now), now)

    def _handle(self, index: int, event: Up, now: float) -> None:
        events = self._worker_events
        match event:
            case Tokens():
                owner = self._owner(index, event.tag)
                owner.heartbeats.note_tokens(now)
                events.on_tokens(owner, event, now)
            case Accepted():
                events.on_accepted(self._heard(index, event.tag, now), event)
            case Prefilled():
                events.on_prefilled(self._heard(index, event.tag, now), event)
            case Finished():
                events.on_finished(self._heard(index, event.tag, now), event, now)
            case Preempted():
                events.on_preempted(self._heard(index, event.tag, now), event, now)
            case Rejected():
                events.on_rejected(self._heard(index, event.tag, now), event, now)
            case Flushed():
                events.on_flushed(self._heard(index, event.tag, now), event)
            case Heartbeat():
                self._heartbeat(index, event, now)
            case Hello():
                self._fleet.carry_out(self._supervisor.on_hello(index, now), now)
            case Ready():
                self._fleet.on_ready(index, event, now)
            case Failed():
                self._fleet.carry_out(self._supervisor.on_failed(index, event, now), now)
            case _:
                assert_never(event)

    def _owner(self, index: int, tag: str) -> Owner:
        owner = self._ranks.get(index)
        if owner is None:
            raise ProtocolError(f"worker {index}: {tag} before it was ready")
        return owner

    def _heard(self, index: int, tag: str, now: float) -> Owner:
        owner = self._owner(index, tag)
        owner.heartbeats.note_message(now)
        return owner

    def _heartbeat(self, index: int, heartbeat: Heartbeat, now: float) -> None:
        self._fleet.on_heartbeat(index, heartbeat)
        self._supervisor.on_phase(index, heartbeat.phase, now)
        owner = self._ranks.get(index)
        if owner is None:
            return
        # Messages arrive in order: fewer running than accepted requests mean a lost ``Finished``.
        accepted = len(owner.grants) - len(owner.unaccepted)
        if heartbeat.running < accepted:
            raise ProtocolError(f"worker {index}: runs {heartbeat.running} of {accepted} requests")
        owner.on_heartbeat(heartbeat, now)
