"""The controller without an event loop: each entry point acts at once, by a given clock.

The parts, and which calls which. The bottom line of each half is what the parts above it share::

    submit, cancel ───► Admission, RequestLifecycle ──┐
    request events ───► EventDispatch ► WorkerEvents ─┴► Dispatcher ─► Fleet.post ─► worker
                                                          └► Router chooses the owner
          RequestTable (all requests), RankTable (ready owners), OpenStreams (to clients)

    worker events ────► EventDispatch ─┐
    ticks ────────────► HealthMonitor ─┼► Supervisor ─ actions ─► Fleet.carry_out ─► processes
    ticks ────────────► RollingRestart ┤                           │
    exits ────────────► ControlCore ───┘                           │
          RankTable, WorkerRecords                                 │
                                                                   ▼
    ControlCore: owner_lost, worker_failed ─► RequestLifecycle, Router, CacheFlushes
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlx_dp.orchestrator.api import Generation, OverloadedError, RefusedError, ServiceStatus
from mlx_dp.orchestrator.control.awaitable_predicates import AwaitablePredicates
from mlx_dp.orchestrator.control.event_dispatch import EventDispatch
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.requests.admission import Admission
from mlx_dp.orchestrator.control.requests.cache_flush import CacheFlushes
from mlx_dp.orchestrator.control.requests.dispatch import Dispatcher
from mlx_dp.orchestrator.control.requests.lifecycle import RequestLifecycle
from mlx_dp.orchestrator.control.requests.response_stream import BufferedStream, OpenStreams
from mlx_dp.orchestrator.control.requests.worker_events import WorkerEvents
from mlx_dp.orchestrator.control.routing.router import Router
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Hold
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.orchestrator.control.state_views import StateViews
from mlx_dp.orchestrator.control.workers.actions import Loss, RemoveOwner
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts, Fleet
from mlx_dp.orchestrator.control.workers.health import HealthMonitor
from mlx_dp.orchestrator.control.workers.record import ALIVE
from mlx_dp.orchestrator.control.workers.rolling_restart import RollingRestart
from mlx_dp.orchestrator.control.workers.start_messages import StartMessages
from mlx_dp.orchestrator.control.workers.supervisor import Supervisor
from mlx_dp.orchestrator.options import ServeOptions
from mlx_dp.proto.capacity.parallel import ReplicaMode

_logger = logging.getLogger(__name__)


class ControlCore:
    """Wires the parts together; the parts make every decision.

    Entry points are arrivals of messages, exits of processes, ticks and calls. Each of them ends
    with ``_run_once``, which grants queued requests and wakes coroutines whose predicate is true.
    """

    def __init__(
        self,
        options: ServeOptions,
        ports: ControlPorts,
        limits: ControlLimits,
        clock: Callable[[], float],
        rng: random.Random,
        wake_after: Callable[[float], None],
    ) -> None:
        starts = StartMessages(options, ports.addresses)
        mode, queue = options.ownership.mode, options.queue
        self._needs_all: Final = mode is ReplicaMode.DP_ATTENTION
        self._limits: Final = limits
        self._clock: Final = clock
        self._wake_after: Final = wake_after
        self._transport: Final = ports.transport
        self._exits: Final[list[tuple[float, int, int]]] = []
        self.draining = False
        self.failure: Exception | None = None
        self.predicates: Final = AwaitablePredicates()
        counters, ranks = Counters(), RankTable(ahead=limits.ahead)
        self.counters: Final = counters
        self.ranks: Final = ranks
        self.supervisor: Final = Supervisor(len(starts), mode, limits.supervisor, rng)
        self.fleet: Final = Fleet(self.supervisor, ranks, ports, starts, counters, self)
        self.restarts: Final = RollingRestart(
            self.supervisor, ranks, drain_s=limits.restart_drain_s
        )
        self.views: Final = StateViews(self.supervisor, self.fleet, ranks, self.restarts, counters)
        self._health: Final = HealthMonitor(
            limits.liveness,
            ranks,
            self.fleet.halted,
            lag_tolerance_s=limits.lag_tolerance_s,
            lockstep=self._needs_all,
        )
        post = self.fleet.post
        self.streams: Final = OpenStreams(counters, self)
        self.table: Final = RequestTable(queue, self.streams.end)
        self._router: Final = Router(queue.load_balance_method, rng)
        dispatcher = Dispatcher(self.table, ranks, self._router, self.streams, post)
        self.flushes: Final = CacheFlushes(len(starts), ranks, post)
        self.lifecycle: Final = RequestLifecycle(
            self.table, dispatcher, self.streams, ranks, queue, limits.max_attempts
        )
        self._admission: Final = Admission(
            len(starts), ranks, self.table.queue, self.restarts, counters, queue
        )
        events = WorkerEvents(self.table, dispatcher, self.streams, self.flushes, counters)
        self._events: Final = EventDispatch(self.supervisor, self.fleet, ranks, events, counters)

    def status(self) -> ServiceStatus:
        if self.supervisor.dead:
            return ServiceStatus.DEAD
        if self.draining:
            return ServiceStatus.DRAINING
        if self.restarts.no_owner_serves:
            return ServiceStatus.RESTARTING
        needed = len(self.supervisor.workers) if self._needs_all else 1
        return ServiceStatus.READY if len(self.ranks) >= needed else ServiceStatus.STARTING

    def begin(self) -> None:
        """Start the first worker."""
        now = self._clock()
        self._health.note_lag(now, self._limits.tick_s)
        self.fleet.carry_out(self.supervisor.start(now), now)
        self._run_once(now)

    def submit(self, generation: Generation) -> BufferedStream:
        """Queue a request. Raises OverloadedError or RefusedError; then nothing was queued."""
        with self._ending_on_error():
            max_tokens = self._admission.check(generation, self.status())
            now = self._clock()
            stream = self.lifecycle.submit(generation, max_tokens, now)
            self._run_once(now)
            return stream

    def cancel(self, request_id: int) -> None:
        """End a request as ABORT, in any state: its client is gone."""
        with self._ending_on_error():
            now = self._clock()
            self.lifecycle.cancel(request_id, now)
            self._run_once(now)

    def complete(self, request_id: int) -> None:
        """End a request as STOP, in any state: its client has all that it requested."""
        with self._ending_on_error():
            now = self._clock()
            self.lifecycle.complete(request_id, now)
            self._run_once(now)

    def begin_flush(self) -> int:
        """Ask every ready owner to drop its cached prefixes. The caller must end the flush."""
        with self._ending_on_error():
            flush_id = self.flushes.begin()
            self._run_once(self._clock())
            return flush_id

    def stop(self) -> None:
        """End every request with an error, and ask every process to exit."""
        now = self._clock()
        self.draining = True
        self.lifecycle.abandon("the service is shutting down", "shutting_down", now)
        self.restarts.stop()
        self.supervisor.stop(now)
        self.fleet.shut_down()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except (OverloadedError, RefusedError):
            raise
        except Exception as error:
            self.on_internal_error(error)
            raise

    def on_internal_error(self, error: Exception) -> None:
        """End the service after an internal error: its state may be wrong."""
        _logger.error("internal error in the controller", exc_info=error)
        self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """End the service, for a cause outside its workers."""
        self.failure = self.failure or error
        self.predicates.wake()

    def on_arrival(self) -> None:
        """Handle what workers have sent."""
        now = self._clock()
        for identity, event in self._transport.drain():
            self._events.handle(identity, event, now)
        self._run_once(now)

    def tick(self) -> None:
        """Run everything that is due. Messages come first, so a late event still counts."""
        now = self._clock()
        missed_s = self._health.note_lag(now, self._limits.tick_s)
        if missed_s:
            _logger.warning(
                "the controller did not run for %.1f s: no worker is blamed for that time", missed_s
            )
            self.supervisor.extend_deadlines(now, missed_s)
        self.on_arrival()
        self._settle_exits(now)
        for index, loss in self._health.judge_owners(now):
            self.fleet.carry_out(self.supervisor.on_loss(index, loss, now), now)
        for owner, grant in self._health.unaccepted_in_time(now):
            self.lifecycle.withdraw(owner, grant, now)
        self.fleet.carry_out(self.supervisor.tick(now, self.fleet.halted), now)
        self.fleet.carry_out(self.restarts.tick(now), now)
        self.lifecycle.expire(now)
        self.flushes.retry()
        self.views.update_rates(now)
        self._run_once(now)

    def _run_once(self, now: float) -> None:
        if self.ranks.take_limits_changed():
            self.lifecycle.refit_queued(now)
        self.lifecycle.dispatch(now)
        while self.fleet.drop_unreachable(now):
            self.lifecycle.dispatch(now)
        if self.supervisor.dead and not self.lifecycle.idle:
            assert self.supervisor.cause is not None, "dead without a cause"
            message = f"all workers have failed: {self.supervisor.cause.detail}"
            self.lifecycle.abandon(message, "no_worker", now)
        self.predicates.wake()

    def owner_lost(self, gone: RemoveOwner, grants: tuple[Grant, ...]) -> None:
        """An owner was removed from the ranks, with its grants."""
        self.flushes.owner_lost(gone.index)
        self._router.forget_owner(gone.index)
        self.lifecycle.owner_lost(grants, gone.loss, culprit=gone.culprit, now=self._clock())

    def worker_failed(self, index: int, loss: Loss) -> None:
        """A worker has failed for good."""
        self.ranks.drop_limits(index)
        self.lifecycle.abandon_pinned(
            index, f"owner {index} has failed: {loss.detail}", self._clock()
        )

    def process_exited(self, index: int, status: int) -> None:
        """Grant nothing more to a worker whose process has exited; handle the exit a moment later.

        By then its last messages have been read, so a request that finished in time is not lost.
        """
        # The event loop calls this, and would only log an error.
        with self._ending_on_error():
            owner = self.ranks.get(index)
            if owner is not None:
                owner.holds.add(Hold.CLOSED)
            self.supervisor.domains.domain_of(index).exits.setdefault(index, status)
            alive = self.supervisor.workers[index].status in ALIVE
            settle_s = self._limits.exit_settle_s if alive else 0.0
            self._exits.append((self._clock() + settle_s, index, status))
            self._wake_after(settle_s)

    def settle_exits(self) -> None:
        """Handle the exits that are due."""
        self.on_arrival()
        now = self._clock()
        self._settle_exits(now)
        self._run_once(now)

    def _settle_exits(self, now: float) -> None:
        due = [each for each in self._exits if each[0] <= now]
        self._exits[:] = [each for each in self._exits if each[0] > now]
        for _, index, status in due:
            self.fleet.carry_out(self.supervisor.on_exit(index, status, now), now)

    def check(self) -> None:
        """Assert every invariant; for idle loops and tests."""
        self.ranks.check()
        self.lifecycle.check()
