"""The control plane behind ``Service``: the core, driven by the event loop's clock and sockets."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final, NoReturn

from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.counters import ControllerCounters, RequestObserver
from mlx_dp.orchestrator.control.fleet import Outside
from mlx_dp.orchestrator.control.limits import ControlLimits, control_limits
from mlx_dp.orchestrator.control.worker_view import WorkerView
from mlx_dp.orchestrator.options import ServeOptions
from mlx_dp.orchestrator.service import Answer, Generation, OwnerFlush, ServiceState
from mlx_dp.orchestrator.worker_states import WorkerState
from mlx_dp.proto.admission import AdmissionLimits
from mlx_dp.proto.messages import FailureKind

_logger = logging.getLogger(__name__)


class ServiceDeadError(Exception):
    """No worker is left that could serve, or none can be launched. The message is the cause.

    ``kind`` tells a configuration that cannot work from a crash; None: it crashed.
    """

    def __init__(self, cause: str, kind: FailureKind | None) -> None:
        super().__init__(cause)
        self.kind = kind


class Controller:
    """Implements ``Service``. Everything runs in the event loop, and nothing ever blocks it."""

    def __init__(
        self,
        options: ServeOptions,
        outside: Outside,
        *,
        limits: ControlLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        host_of: Callable[[int], str | None] | None = None,
    ) -> None:
        """``host_of``: the machine a worker has a place on, for those that are not all on ours."""
        self._options: Final = options
        self._limits: Final = limits or control_limits(options.worker)
        self._transport: Final = outside.transport
        self._core: Final = ControlCore(
            options,
            outside,
            self._limits,
            clock,
            rng or random.SystemRandom(),
            self._settle_after,
        )
        core = self._core
        self._workers: Final = WorkerView(
            core.supervisor, core.fleet, core.book, core.restarts, clock
        )
        self._host_of: Final = host_of
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def state(self) -> ServiceState:
        queue = self._core.desk.queue
        return ServiceState(
            status=self._core.status(),
            mode=self._options.ownership.mode,
            load_balance_method=self._options.queue.load_balance_method,
            tp_size=self._options.ownership.slices[0].parallel.tp_size,
            queued_requests=len(queue),
            queued_tokens=queue.num_tokens,
            max_queued_requests=self._options.queue.max_queued_requests,
            owners=self._core.view.owners(),
        )

    def workers(self) -> tuple[WorkerState, ...]:
        return self._workers.states()

    def restart_worker(self, index: int) -> tuple[int, ...]:
        return self._core.restarts.ask(index)

    def restart_all(self) -> tuple[int, ...]:
        """Have every ready worker replaced, one after another. Raises RestartRefusedError."""
        return self._core.restarts.ask_all()

    def limits(self) -> AdmissionLimits | None:
        return self._core.book.limits()

    def counters(self) -> ControllerCounters:
        return self._core.tally.snapshot(unknown_frames=self._transport.unknown_frames)

    def observe(self, observer: RequestObserver) -> None:
        self._core.answers.observe(observer)

    def submit(self, generation: Generation) -> Answer:
        return self._core.submit(generation)

    async def flush_cache(self, timeout_s: float) -> tuple[OwnerFlush, ...]:
        core = self._core
        flush_id = core.begin_flush()
        try:
            await core.conditions.wait(lambda: core.flushes.done(flush_id), timeout_s)
        finally:
            results = core.flushes.end(flush_id)
        return results

    async def start(self) -> None:
        """Begin to start workers; returns at once. ``state`` shows how far it is."""
        self._transport.attach(asyncio.get_running_loop(), self._guarded(self._core.on_arrival))
        self._place()
        self._core.begin()
        self._schedule_tick()

    async def watch(self) -> NoReturn:
        """Wait for as long as the service can go on. Raises ServiceDeadError, or our own bug."""
        core, supervisor = self._core, self._core.supervisor
        await core.conditions.wait(lambda: core.failure is not None or supervisor.dead)
        if core.failure is not None:
            raise core.failure
        assert supervisor.cause is not None, "dead without a cause"
        raise ServiceDeadError(supervisor.cause.detail, supervisor.cause.failure)

    def give_up(self, cause: str, kind: FailureKind | None) -> None:
        """Let ``watch`` end the service for a cause that lies outside its workers."""
        self._core.give_up(ServiceDeadError(cause, kind))

    def _schedule_tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.tick_s, self._guarded(self._tick_on))

    def _tick_on(self) -> None:
        self._place()
        self._core.tick()
        self._schedule_tick()

    def _place(self) -> None:
        if self._host_of is not None:
            self._core.supervisor.place(self._host_of)

    def _settle_after(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._guarded(self._core.settle_exits))

    def _guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        """Wrap a callback: its error would only be logged, and leave a service that is no more."""

        def run() -> None:
            if self._stopped:
                return
            try:
                act()
            except Exception as error:
                self._core.broke(error)

        return run

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, let what is in hand finish within the time, then stop."""
        core = self._core
        core.draining = True
        core.restarts.stop()
        await core.conditions.wait(lambda: core.desk.idle or core.supervisor.dead, timeout_s)
        await self.stop()

    async def stop(self) -> None:
        """End what is in hand, and the workers, by SIGKILL if need be. Idempotent.

        Only one that the system itself cannot end may be left when this returns.
        """
        if self._stopped:
            return
        core = self._core
        core.stop()
        if not await core.conditions.wait(self._gone, self._limits.stop_grace_s):
            _logger.warning("some workers do not stop by themselves: they are killed")
            self.kill_all()
            await core.conditions.wait(self._gone, self._limits.stop_grace_s)
        self.close()
        core.conditions.check()

    def _gone(self) -> bool:
        return self._core.supervisor.gone

    def abandon(self) -> None:
        """End every request with an error and every worker by SIGKILL, without waiting.

        A ``drain`` or ``stop`` that is under way goes on, and soon ends.
        """
        if not self._stopped:
            self._core.stop()
            self.kill_all()
            self._core.conditions.check()

    def kill_all(self) -> None:
        """SIGKILL to every worker, without waiting."""
        self._core.fleet.kill_all()

    def close(self) -> None:
        """Hear nobody any more, and leave no socket behind. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def check(self) -> None:
        """Assert every invariant; for idle loops and tests."""
        self._core.check()
