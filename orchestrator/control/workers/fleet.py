"""The fleet: carries out the supervisor's actions on processes, the channel and the ranks."""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Hold, Owner
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.workers.actions import (
    Action,
    AddOwner,
    CloseOwner,
    Dismiss,
    DrainOwner,
    DumpStacks,
    GiveUp,
    Kill,
    Loss,
    RemoveOwner,
    SendStart,
    Spawn,
)
from mlx_dp.orchestrator.control.workers.start_messages import StartMessages
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor
from mlx_dp.orchestrator.ports import AddressSource, Launcher, Transport, WorkerProcess
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.commands import Down, Drain, Shutdown
from mlx_dp.proto.messages.events import Heartbeat, Ready
from mlx_dp.proto.wire.controller_channel import NotConnectedError, PeerCongestedError

_logger = logging.getLogger(__name__)


class FleetListener(Protocol):
    """Receives what happens to owners and processes."""

    def owner_lost(self, gone: RemoveOwner, grants: tuple[Grant, ...]) -> None:
        """An owner was removed from the ranks, with its grants."""

    def worker_failed(self, index: int, loss: Loss) -> None:
        """A worker has failed for good."""

    def process_exited(self, index: int, status: int) -> None:
        """A process has exited; its last messages may not have been read yet."""


@dataclass(slots=True)
class ControlPorts:
    """The ports that the fleet acts on. Only a dp-attention group needs ``addresses``."""

    transport: Transport
    launcher: Launcher
    addresses: AddressSource | None = None


class Fleet:
    """The workers as processes and peers. An identity stands for one incarnation of a worker."""

    def __init__(
        self,
        supervisor: Supervisor,
        ranks: RankTable,
        ports: ControlPorts,
        starts: StartMessages,
        counters: Counters,
        listener: FleetListener,
    ) -> None:
        self._supervisor: Final = supervisor
        self._ranks: Final = ranks
        self._transport: Final = ports.transport
        self._launcher: Final = ports.launcher
        self._starts: Final = starts
        self._counters: Final = counters
        self._listener: Final = listener
        self._processes: Final[dict[int, WorkerProcess]] = {}
        self._indices: Final[dict[str, int]] = {}
        self._readies: Final[dict[int, Ready]] = {}
        self._heartbeats: Final[dict[int, Heartbeat]] = {}
        self._unreachable: Final[dict[int, str]] = {}

    def index_of(self, identity: str) -> int | None:
        """The worker whose present incarnation has this identity, or None."""
        return self._indices.get(identity)

    def heartbeat_of(self, index: int) -> Heartbeat | None:
        """The last heartbeat of the present incarnation, until it is lost."""
        return self._heartbeats.get(index)

    def on_heartbeat(self, index: int, heartbeat: Heartbeat) -> None:
        self._heartbeats[index] = heartbeat

    def on_ready(self, index: int, ready: Ready, now: float) -> None:
        """Handle a ``Ready``. Raises ProtocolError if the worker was not told to load."""
        actions = self._supervisor.on_ready(index, now)
        self._readies[index] = ready
        self.carry_out(actions, now)

    def carry_out(self, actions: list[Action], now: float) -> None:
        """Carry out all actions, and those that follow from them."""
        pending = deque(actions)
        while pending:
            pending += self._carry_out(pending.popleft(), now)

    def _carry_out(self, action: Action, now: float) -> list[Action]:
        match action:
            case Spawn(index=index, identity=identity):
                return self._spawn(index, identity, now)
            case SendStart(index=index, identity=identity):
                return self._send_start(index, identity, now)
            case AddOwner(index=index, identity=identity):
                self._add(index, identity, now)
            case CloseOwner(index=index):
                if (owner := self._ranks.get(index)) is not None:
                    owner.holds.add(Hold.CLOSED)
            case DrainOwner(index=index):
                self._drain(index)
            case RemoveOwner():
                self._remove(action)
            case Dismiss(index=index, identity=identity):
                self._dismiss(index, identity)
            case DumpStacks(index=index):
                self._processes[index].abort()
            case Kill(index=index):
                self._processes[index].kill()
            case GiveUp(index=index, loss=loss):
                self._listener.worker_failed(index, loss)
            case _:
                assert_never(action)
        return []

    def _spawn(self, index: int, identity: str, now: float) -> list[Action]:
        worker = self._supervisor.workers[index]
        if worker.restarts:
            self._counters.worker_restarts += 1
        self._indices[identity] = index
        self._transport.expect(identity)

        def on_exit(status: int) -> None:
            self._listener.process_exited(index, status)

        try:
            process = self._launcher.spawn(index, identity, self._transport.endpoint, on_exit)
        except OSError as error:
            return self._supervisor.on_spawn_failed(
                index, f"no process could be started: {error}", now
            )
        self._processes[index] = process
        return self._supervisor.on_spawned(index, process.pid, now)

    def _send_start(self, index: int, identity: str, now: float) -> list[Action]:
        try:
            start = self._starts.start_for(index, self._supervisor.workers[index].epoch)
            self._transport.send(identity, start)
        except (NotConnectedError, PeerCongestedError, OSError) as error:
            loss = Loss(kind=LossKind.DISCONNECTED, detail=str(error))
            return self._supervisor.on_loss(index, loss, now)
        return []

    def _add(self, index: int, identity: str, now: float) -> None:
        ready = self._readies.pop(index)
        owner = self._ranks.add(index, identity, ready, now)
        # Its exit may have been seen before this message was read.
        if index in self._supervisor.domains.domain_of(index).exits:
            owner.holds.add(Hold.CLOSED)
        # An engine without a model, the fake one, has no form of a batch.
        batching = f", batching {ready.batching}" if ready.batching is not None else ""
        _logger.info(
            "worker %s: ready, %s, after %.1f s on %s: %s request slots, %s KV tokens%s",
            *(index, self._supervisor.workers[index].tag, ready.load_s, ready.device),
            *(ready.capacity.request_slots, ready.capacity.pool_tokens, batching),
        )
        weights_warning = self._starts.unplanned_weights(index, ready)
        unbatched = ready.unbatched_reason and f"requests run one by one: {ready.unbatched_reason}"
        for warning in filter(None, (*ready.capacity.warnings, weights_warning, unbatched)):
            _logger.warning("worker %s: %s", index, warning)

    def _drain(self, index: int) -> None:
        owner = self._ranks.get(index)
        assert owner is not None, f"worker {index} drains but is no owner"
        owner.holds.add(Hold.CLOSED)
        # A lost message does no harm: the requests are requeued later in any case.
        self.post(owner, Drain())

    def _remove(self, gone: RemoveOwner) -> None:
        self._counters.worker_lost(gone.loss.kind)
        self._indices.pop(gone.identity, None)
        self._transport.forget(gone.identity)
        self._readies.pop(gone.index, None)
        self._heartbeats.pop(gone.index, None)
        self._unreachable.pop(gone.index, None)
        self._listener.owner_lost(gone, self._ranks.remove(gone.index))

    def post(self, owner: Owner, message: Down) -> bool:
        """Send to an owner. False: it is congested or gone, and gets no request for now."""
        try:
            self._transport.send(owner.identity, message)
        except PeerCongestedError:
            owner.holds.add(Hold.CONGESTED)
            return False
        except NotConnectedError as error:
            # Its loss is handled later: the caller may be in the middle of granting.
            owner.holds.add(Hold.CONGESTED)
            self._unreachable[owner.dp_rank] = str(error)
            return False
        return True

    def drop_unreachable(self, now: float) -> bool:
        """Give up the owners that could not be reached; True if there were any."""
        if not self._unreachable:
            return False
        gone = tuple(self._unreachable.items())
        self._unreachable.clear()
        for index, detail in gone:
            loss = Loss(kind=LossKind.DISCONNECTED, detail=detail)
            self.carry_out(self._supervisor.on_loss(index, loss, now), now)
        return True

    def shut_down(self) -> None:
        """Ask every process to exit. One that is loading reads no message, and is killed."""
        for worker in self._supervisor.workers:
            if not worker.has_process:
                continue
            if worker.status is WorkerStatus.STARTING:
                self._processes[worker.index].kill()
            else:
                self._dismiss(worker.index, worker.identity)

    def _dismiss(self, index: int, identity: str) -> None:
        try:
            self._transport.send(identity, Shutdown())
        except (NotConnectedError, PeerCongestedError):
            # It ignores SIGTERM, and no message reaches it.
            self._processes[index].kill()

    def halted(self, index: int) -> bool:
        """Whether the process of a worker was stopped by a signal, and not continued since."""
        process = self._processes.get(index)
        return process is not None and process.halted

    def kill_all(self) -> None:
        """Kill every process at once."""
        for worker in self._supervisor.workers:
            if worker.has_process:
                self._processes[worker.index].kill()
