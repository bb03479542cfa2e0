"""The controller: implements ``Service`` with the core, driven by the event loop."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final, NoReturn

from mlx_dp.orchestrator.api import Generation, OwnerFlush, ResponseStream, ServiceState
from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.limits import ControlLimits, control_limits
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.options import ServeOptions
from mlx_dp.orchestrator.service_counters import ControllerCounters, RequestObserver
from mlx_dp.orchestrator.worker_states import WorkerState
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.events import FailureKind

_logger = logging.getLogger(__name__)


class ServiceDeadError(Exception):
    """Every worker has failed for good, or none can be launched. The message is the cause.

    ``kind`` tells an impossible configuration from a crash; None: a crash.
    """

    def __init__(self, cause: str, kind: FailureKind | None) -> None:
        super().__init__(cause)
        self.kind = kind


class Controller:
    """Implements ``Service``. Everything runs in the event loop, and nothing blocks it."""

    def __init__(
        self,
        options: ServeOptions,
        ports: ControlPorts,
        *,
        limits: ControlLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        host_of: Callable[[int], str | None] | None = None,
    ) -> None:
        """``host_of`` returns the machine that can host a worker. Only remote workers need it."""
        self._options: Final = options
        self._limits: Final = limits or control_limits(options.worker)
        self._transport: Final = ports.transport
        self._core: Final = ControlCore(
            options,
            ports,
            self._limits,
            clock,
            rng or random.SystemRandom(),
            self._settle_after,
        )
        self._clock: Final = clock
        self.submit: Final[Callable[[Generation], ResponseStream]] = self._core.submit
        self._host_of: Final = host_of
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def state(self) -> ServiceState:
        queue = self._core.table.queue
        return ServiceState(
            status=self._core.status(),
            mode=self._options.ownership.mode,
            load_balance_method=self._options.queue.load_balance_method,
            tp_size=self._options.ownership.slices[0].parallel.tp_size,
            queued_requests=len(queue),
            queued_tokens=queue.num_tokens,
            max_queued_requests=self._options.queue.max_queued_requests,
            owners=self._core.views.owners(),
        )

    def workers(self) -> tuple[WorkerState, ...]:
        return self._core.views.workers(self._clock())

    def restart_worker(self, index: int) -> tuple[int, ...]:
        return self._core.restarts.request(index)

    def restart_all(self) -> tuple[int, ...]:
        """Replace every ready worker, one after another. Raises RestartRefusedError."""
        return self._core.restarts.request_all()

    def limits(self) -> AdmissionLimits | None:
        return self._core.ranks.limits()

    def counters(self) -> ControllerCounters:
        return self._core.counters.snapshot(unknown_frames=self._transport.unknown_frames)

    def observe(self, observer: RequestObserver) -> None:
        self._core.streams.observe(observer)

    async def flush_cache(self, timeout_s: float) -> tuple[OwnerFlush, ...]:
        core = self._core
        flush_id = core.begin_flush()
        try:
            await core.predicates.wait(lambda: core.flushes.done(flush_id), timeout_s)
        finally:
            results = core.flushes.end(flush_id)
        return results

    async def start(self) -> None:
        """Begin to start workers; returns at once. ``state`` shows the progress."""
        self._transport.attach(
            asyncio.get_running_loop(), self._ending_on_error(self._core.on_arrival)
        )
        self._update_hosts()
        self._core.begin()
        self._schedule_tick()

    async def watch(self) -> NoReturn:
        """Wait until the service cannot go on. Raises ServiceDeadError, or an internal error."""
        core, supervisor = self._core, self._core.supervisor
        await core.predicates.wait(lambda: core.failure is not None or supervisor.dead)
        if core.failure is not None:
            raise core.failure
        assert supervisor.cause is not None, "dead without a cause"
        raise ServiceDeadError(supervisor.cause.detail, supervisor.cause.failure)

    def give_up(self, cause: str, kind: FailureKind | None) -> None:
        """End the service, for a cause outside its workers: ``watch`` raises it."""
        self._core.give_up(ServiceDeadError(cause, kind))

    def _schedule_tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.tick_s, self._ending_on_error(self._tick_on))

    def _tick_on(self) -> None:
        self._update_hosts()
        self._core.tick()
        self._schedule_tick()

    def _update_hosts(self) -> None:
        if self._host_of is not None:
            self._core.supervisor.set_hosts(self._host_of)

    def _settle_after(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(
            delay_s, self._ending_on_error(self._core.settle_exits)
        )

    def _ending_on_error(self, act: Callable[[], None]) -> Callable[[], None]:
        """Wrap a callback, so that its error ends the service: the loop would only log it."""

        def run() -> None:
            if self._stopped:
                return
            try:
                act()
            except Exception as error:
                self._core.on_internal_error(error)

        return run

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the present ones finish within the time, then stop."""
        core = self._core
        core.draining = True
        core.restarts.stop()
        await core.predicates.wait(lambda: core.lifecycle.idle or core.supervisor.dead, timeout_s)
        await self.stop()

    async def stop(self) -> None:
        """End all requests and workers, by SIGKILL if necessary. Idempotent.

        When this returns, only processes that the system itself cannot kill may be left.
        """
        if self._stopped:
            return
        core = self._core
        core.stop()
        if not await core.predicates.wait(self._all_exited, self._limits.stop_grace_s):
            _logger.warning("some workers did not exit when asked: killing them")
            self.kill_all()
            await core.predicates.wait(self._all_exited, self._limits.stop_grace_s)
        self.close()
        core.predicates.wake()

    def _all_exited(self) -> bool:
        return self._core.supervisor.all_exited

    def abandon(self) -> None:
        """End every request with an error and every worker by SIGKILL, without waiting.

        A ``drain`` or ``stop`` in progress then ends soon.
        """
        if not self._stopped:
            self._core.stop()
            self.kill_all()
            self._core.predicates.wake()

    def kill_all(self) -> None:
        """Send SIGKILL to every worker, without waiting."""
        self._core.fleet.kill_all()

    def close(self) -> None:
        """Stop the timer and close the socket. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def check(self) -> None:
        """Assert every invariant; for idle loops and tests."""
        self._core.check()
