"""The controller without an event loop: every entry point acts at once, by a given clock."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlx_dp.orchestrator.control.admission import Admission
from mlx_dp.orchestrator.control.answer_desk import AnswerDesk
from mlx_dp.orchestrator.control.answers import RequestAnswer
from mlx_dp.orchestrator.control.cache_flush import CacheFlushes
from mlx_dp.orchestrator.control.conditions import Conditions
from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.fleet import Fleet, Outside
from mlx_dp.orchestrator.control.health_watch import HealthWatch
from mlx_dp.orchestrator.control.inbox import Inbox
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.owner import Lease
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.request_desk import RequestDesk
from mlx_dp.orchestrator.control.rolling_restart import RollingRestart
from mlx_dp.orchestrator.control.service_view import ServiceView, TokenRates
from mlx_dp.orchestrator.control.supervisor import Supervisor
from mlx_dp.orchestrator.control.supervisor_steps import Loss, RemoveOwner
from mlx_dp.orchestrator.control.worker_record import ALIVE
from mlx_dp.orchestrator.control.worker_starts import WorkerStarts
from mlx_dp.orchestrator.options import ServeOptions
from mlx_dp.orchestrator.service import Generation, OverloadedError, RefusedError, ServiceStatus
from mlx_dp.proto.messages import FinishReason
from mlx_dp.proto.parallel import ReplicaMode

_logger = logging.getLogger(__name__)


class ControlCore:
    """Joins the parts; every decision is made inside one of them.

    Entry points are arrivals, exits, ticks and calls. Each ends with ``_turn``, which grants what
    can be granted and wakes who waits.
    """

    def __init__(
        self,
        options: ServeOptions,
        outside: Outside,
        limits: ControlLimits,
        clock: Callable[[], float],
        rng: random.Random,
        wake_after: Callable[[float], None],
    ) -> None:
        starts = WorkerStarts(options, outside.addresses)
        self._needs_all: Final = options.ownership.mode is ReplicaMode.DP_ATTENTION
        self._limits: Final = limits
        self._clock: Final = clock
        self._wake_after: Final = wake_after
        self._transport: Final = outside.transport
        self._exits: Final[list[tuple[float, int, int]]] = []
        self.draining = False
        self.failure: Exception | None = None
        self.conditions: Final = Conditions()
        self.tally: Final = Tally()
        self.supervisor: Final = Supervisor(
            len(starts), options.ownership.mode, limits.supervisor, rng
        )
        self.book: Final = OwnerBook(ahead=limits.ahead)
        self.fleet: Final = Fleet(self.supervisor, self.book, outside, starts, self.tally, self)
        self.answers: Final = AnswerDesk(self.tally, self._leave)
        self.desk: Final = RequestDesk(
            options.queue, limits.max_attempts, self.book, self.answers, self.tally, self.fleet.post
        )
        self.flushes: Final = CacheFlushes(len(starts), self.book, self.fleet.post)
        self.restarts: Final = RollingRestart(
            self.supervisor, self.book, drain_s=limits.restart_drain_s
        )
        self._admission: Final = Admission(
            len(starts), self.book, self.desk.queue, self.restarts, self.tally, options.queue
        )
        self._inbox: Final = Inbox(
            self.supervisor, self.fleet, self.book, self.desk, self.flushes, self.tally
        )
        self._health: Final = HealthWatch(
            limits.liveness,
            self.book,
            self.fleet.halted,
            lag_tolerance_s=limits.lag_tolerance_s,
            lockstep=self._needs_all,
        )
        self._rates: Final = TokenRates(self.tally.generated_by_owner)
        self.view: Final = ServiceView(
            self.supervisor, self.fleet, self.book, self.restarts, self._rates, self.tally
        )

    def status(self) -> ServiceStatus:
        if self.supervisor.dead:
            return ServiceStatus.DEAD
        if self.draining:
            return ServiceStatus.DRAINING
        if self.restarts.holds_all:
            return ServiceStatus.RESTARTING
        needed = len(self.supervisor.workers) if self._needs_all else 1
        return ServiceStatus.READY if len(self.book) >= needed else ServiceStatus.STARTING

    def begin(self) -> None:
        """Start the first worker."""
        now = self._clock()
        self._health.slept(now, self._limits.tick_s)
        self.fleet.carry_out(self.supervisor.start(now), now)
        self._turn(now)

    def submit(self, generation: Generation) -> RequestAnswer:
        """Raises OverloadedError or RefusedError; then nothing was queued."""
        with self._watched():
            max_tokens = self._admission.check(generation, self.status())
            now = self._clock()
            answer = self.desk.submit(generation, max_tokens, now)
            self._turn(now)
            return answer

    def begin_flush(self) -> int:
        """Have every ready owner drop its cached prefixes. Whoever calls ends it in ``flushes``."""
        with self._watched():
            flush_id = self.flushes.begin()
            self._turn(self._clock())
            return flush_id

    def stop(self) -> None:
        """End what is in hand with an error, and ask every process to exit."""
        now = self._clock()
        self.draining = True
        self.desk.abandon("the service is shutting down", "shutting_down", now)
        self.restarts.stop()
        self.supervisor.stop(now)
        self.fleet.shut_down()

    def _leave(self, request_id: int, reason: FinishReason) -> None:
        with self._watched():
            now = self._clock()
            self.desk.leave(request_id, reason, now)
            self._turn(now)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (OverloadedError, RefusedError):
            raise
        except Exception as error:
            self.broke(error)
            raise

    def broke(self, error: Exception) -> None:
        """A bug of ours came up: the books may be wrong, so that the service has to end."""
        _logger.error("the controller broke", exc_info=error)
        self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """The service cannot go on, for a cause outside its workers."""
        self.failure = self.failure or error
        self.conditions.check()

    def on_arrival(self) -> None:
        """Take in what workers have said."""
        now = self._clock()
        for identity, fact in self._transport.drain():
            self._inbox.take(identity, fact, now)
        self._turn(now)

    def tick(self) -> None:
        """Do what the passing of time asks for. Arrivals come first: late news is still news."""
        now = self._clock()
        missed_s = self._health.slept(now, self._limits.tick_s)
        if missed_s:
            _logger.warning("the controller did not run for %.1f s: nobody is judged", missed_s)
            self.supervisor.forgive(now, missed_s)
        self.on_arrival()
        self._settle_exits(now)
        for index, loss in self._health.losses(now):
            self.fleet.carry_out(self.supervisor.lost(index, loss, now), now)
        for owner, lease in self._health.unanswered(now):
            self.desk.withdraw(owner, lease, now)
        self.fleet.carry_out(self.supervisor.tick(now, self.fleet.halted), now)
        self.fleet.carry_out(self.restarts.tick(now), now)
        self.desk.expire(now)
        self.flushes.retry()
        self._rates.roll(now)
        self._turn(now)

    def _turn(self, now: float) -> None:
        if self.book.take_limits_changed():
            self.desk.refit(now)
        self.desk.dispatch(now)
        while self.fleet.drop_unreachable(now):
            self.desk.dispatch(now)
        if self.supervisor.dead and not self.desk.idle:
            assert self.supervisor.cause is not None, "dead without a cause"
            message = f"all workers have failed: {self.supervisor.cause.detail}"
            self.desk.abandon(message, "no_worker", now)
        self.conditions.check()

    def owner_lost(self, gone: RemoveOwner, leases: tuple[Lease, ...]) -> None:
        """An owner was struck out of the book, with what it held."""
        self.flushes.owner_lost(gone.index)
        self.desk.forget_prefixes(gone.index)
        self.desk.owner_lost(leases, gone.loss, culprit=gone.culprit, now=self._clock())

    def worker_failed(self, index: int, loss: Loss) -> None:
        """A worker stays down for good."""
        self.book.forget(index)
        self.desk.abandon_pinned(index, f"owner {index} has failed: {loss.detail}", self._clock())

    def process_exited(self, index: int, status: int) -> None:
        """A process has ended. It gets nothing from now on.

        Its last messages may still be on their way to us, and a request that finished in time
        must not count as lost: so the loss is settled a moment later.
        """
        # It comes from the loop itself, which would only log an error.
        with self._watched():
            owner = self.book.get(index)
            if owner is not None:
                owner.closed = True
            self.supervisor.domains.of(index).exits.setdefault(index, status)
            alive = self.supervisor.workers[index].status in ALIVE
            settle_s = self._limits.exit_settle_s if alive else 0.0
            self._exits.append((self._clock() + settle_s, index, status))
            self._wake_after(settle_s)

    def settle_exits(self) -> None:
        """Count the processes as gone whose moment has passed."""
        self.on_arrival()
        now = self._clock()
        self._settle_exits(now)
        self._turn(now)

    def _settle_exits(self, now: float) -> None:
        due = [each for each in self._exits if each[0] <= now]
        self._exits[:] = [each for each in self._exits if each[0] > now]
        for _, index, status in due:
            self.fleet.carry_out(self.supervisor.exited(index, status, now), now)

    def check(self) -> None:
        """Assert every invariant; for idle loops and tests."""
        self.book.check()
        self.desk.check()
