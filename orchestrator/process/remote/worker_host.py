"""Hosts one worker on this machine for a controller on another (``mlx-dp worker``)."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, assert_never

from mlx_dp.orchestrator.exit_status import describe_exit
from mlx_dp.orchestrator.ports import Launcher, WorkerProcess
from mlx_dp.orchestrator.process.remote.host_link import ControllerPlace, HostLink, LinkLost
from mlx_dp.orchestrator.restart_budget import BackOff
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.host_messages import (
    Join,
    Launch,
    Leave,
    SignalWorker,
    WorkerExited,
    host_identity,
)
from mlx_dp.proto.wire.host_channel import HostChannel

_logger = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 1.0
_REPEAT_S: Final = 600.0
"""The least time between two logs of the same warning."""


class LauncherFactory(Protocol):
    """Makes the launcher for a worker that the controller requests."""

    def __call__(self, launch: Launch) -> Launcher:
        """Return the launcher, maybe after seconds. Raises ConfigError if the worker cannot run."""


class WorkerHost:
    """Keeps a connection to the controller, and handles its messages.

    A worker never outlives the connection that requested it: without the controller, it cannot
    know whether its requests have been given to other workers.
    """

    def __init__(
        self,
        join: Join,
        place: ControllerPlace,
        connect: Callable[[str], HostChannel],
        make_launcher: LauncherFactory,
        stop: asyncio.Event,
        *,
        once: bool = False,
    ) -> None:
        """``once``: return when the connection ends, instead of making a new one."""
        self._join: Final = join
        self._place: Final = place
        self._connect: Final = connect
        self._make_launcher: Final = make_launcher
        self._stop: Final = stop
        self._once: Final = once
        self._wakeup: Final = asyncio.Event()
        self._back_off: Final = BackOff(first_s=0.5, longest_s=10.0, healthy_s=10.0)
        self._launching: asyncio.Task[None] | None = None
        self._worker: HostedWorker | None = None
        self._refusal: str | None = None
        self._unwanted = ""
        self._had_place = False
        self._throttle: Final = LogThrottle(_REPEAT_S)

    async def run(self) -> int:
        """Run until ``stop`` is set, and return the exit status.

        Raises ConfigError when retrying is useless.
        """
        stopping = asyncio.create_task(self._stop.wait())
        stopping.add_done_callback(lambda _: self._wakeup.set())
        rng = random.SystemRandom()
        try:
            while True:
                began = time.monotonic()
                channel = self._connect(host_identity(self._join.rank, rng.getrandbits(64)))
                try:
                    lost = await self._serve(channel)
                    await self._end_worker()
                    channel.send(Leave(reason=lost.reason))
                finally:
                    channel.close(linger_s=_LAST_WORDS_S)
                if self._stop.is_set():
                    return ExitCode.OK
                if lost.final:
                    raise ConfigError(lost.reason)
                self._warn(lost.reason)
                if self._once:
                    return ExitCode.PARENT_GONE
                delay_s = self._back_off.delay(time.monotonic() - began, rng)
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._stop.wait()
        finally:
            stopping.cancel()

    def _warn(self, reason: str) -> None:
        """Log a warning, but rarely the same one: the host retries to connect all the time."""
        if self._throttle.admit(reason, time.monotonic()):
            _logger.warning("%s", reason)

    async def _serve(self, channel: HostChannel) -> LinkLost:
        """Serve the controller on this connection, until it is lost."""
        loop = asyncio.get_running_loop()
        link = HostLink(
            self._join, self._place, heard_at=time.monotonic(), had_place=self._had_place
        )
        joined = False
        loop.add_reader(channel.descriptor, self._wakeup.set)
        try:
            while True:
                self._wakeup.clear()
                lost = self._run_once(channel, link)
                if link.joined and not joined:
                    joined = self._had_place = True
                    self._throttle.reset()
                    place = self._place.endpoint
                    _logger.info("rank %s: has joined %s", self._join.rank, place)
                if lost is not None:
                    return lost
                with suppress(TimeoutError):
                    async with asyncio.timeout(link.heartbeat_s / 2):
                        await self._wakeup.wait()
        finally:
            loop.remove_reader(channel.descriptor)

    def _run_once(self, channel: HostChannel, link: HostLink) -> LinkLost | None:
        if self._stop.is_set():
            return LinkLost("it was asked to stop", final=False)
        for message in channel.drain():
            match link.handle(message, time.monotonic()):
                case Launch() as launch:
                    if self._worker is not None or self._launching is not None:
                        return LinkLost("the controller launched a second worker", final=False)
                    self._launching = asyncio.create_task(self._start(launch))
                case SignalWorker() as wanted:
                    self._signal(wanted)
                case LinkLost() as lost:
                    return lost
                case None:
                    pass
                case other:
                    assert_never(other)
        if self._launching is not None and self._launching.done():
            launching, self._launching = self._launching, None
            launching.result()
        if self._refusal is not None:
            return LinkLost(self._refusal, final=True)
        ended = self._report_exit(channel)
        if ended is not None:
            return ended
        match link.poll(time.monotonic(), channel.connection):
            case LinkLost() as lost:
                return lost
            case None:
                return None
            case word:
                channel.send(word)
                return None

    async def _start(self, launch: Launch) -> None:
        try:
            launcher = await asyncio.to_thread(self._make_launcher, launch)
            worker = HostedWorker(launch.identity, self._wakeup.set)
            worker.process = launcher.spawn(
                self._join.rank, launch.identity, self._place.endpoint, worker.ended
            )
            self._worker = worker
            _logger.info("worker %s: started, pid %s", launch.identity, worker.process.pid)
            if self._unwanted == launch.identity:
                worker.signalled = True
                worker.process.kill()
        except (ConfigError, OSError) as error:
            self._refusal = str(error)
        finally:
            self._wakeup.set()

    def _signal(self, wanted: SignalWorker) -> None:
        worker = self._worker
        if worker is None:
            # The worker may still be starting.
            self._unwanted = wanted.identity
            return
        if worker.process is None or worker.identity != wanted.identity:
            return
        worker.signalled = True
        match wanted.signal:
            case signal.SIGABRT:
                worker.process.abort()
            case _:
                worker.process.kill()

    def _report_exit(self, channel: HostChannel) -> LinkLost | None:
        worker = self._worker
        if worker is None or worker.status is None:
            return None
        self._worker = None
        channel.send(WorkerExited(identity=worker.identity, status=worker.status))
        _logger.info(
            "worker %s: %s",
            worker.identity,
            describe_exit(worker.status, expected=worker.signalled),
        )
        if worker.status > 0 and _would_fail_again(worker.status):
            return LinkLost("the worker cannot run here: its last lines say why", final=True)
        return None

    async def _end_worker(self) -> None:
        """Kill the worker. Its exit is not reported, since ``Leave`` implies it."""
        if self._launching is not None:
            launching, self._launching = self._launching, None
            await launching
        worker = self._worker
        if worker is None or worker.process is None:
            return
        worker.process.kill()
        while worker.status is None:
            self._wakeup.clear()
            await self._wakeup.wait()
        self._worker = None


class HostedWorker:
    """The worker on this machine, until its exit has been reported."""

    def __init__(self, identity: str, wake: Callable[[], None]) -> None:
        self.identity: Final = identity
        self.process: WorkerProcess | None = None
        self.status: int | None = None
        self.signalled = False
        """Whether the controller ended it, so that SIGKILL does not suggest a lack of memory."""
        self._wake: Final = wake

    def ended(self, status: int) -> None:
        self.status = status
        self._wake()


@dataclass(slots=True)
class LogThrottle:
    """Lets each sentence through at most once in ``every_s`` seconds."""

    every_s: float
    _said_at: dict[str, float] = field(default_factory=dict)

    def admit(self, sentence: str, now: float) -> bool:
        """Return whether to log the sentence now; if so, start its interval."""
        said_at = self._said_at.get(sentence)
        if said_at is not None and now - said_at < self.every_s:
            return False
        self._said_at[sentence] = now
        return True

    def reset(self) -> None:
        """Let every sentence through again, since the situation has changed."""
        self._said_at.clear()


def _would_fail_again(status: int) -> bool:
    try:
        return ExitCode(status).would_fail_again
    except ValueError:
        return False
