"""``mlx-dp worker``: runs one worker on this machine, for a controller on another."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, assert_never

from mlx_dp.orchestrator.control.exit_status import describe_exit
from mlx_dp.orchestrator.control.ports import Launcher, WorkerProcess
from mlx_dp.orchestrator.control.restart_budget import BackOff
from mlx_dp.orchestrator.process.connection_fault import ControllerPlace
from mlx_dp.orchestrator.process.host_link import HostLink, Lost
from mlx_dp.orchestrator.process.repeated_words import RepeatedWords
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.host_channel import HostChannel
from mlx_dp.proto.host_messages import (
    Join,
    Launch,
    Leave,
    SignalWorker,
    WorkerExited,
    host_identity,
)

_logger = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 1.0
_REPEAT_S: Final = 600.0
"""How often the same trouble is told again."""


class HereLauncher(Protocol):
    """Makes the launcher of a worker that the controller wants here."""

    def __call__(self, launch: Launch) -> Launcher:
        """May take seconds. Raises ConfigError when this machine has not what it takes."""


class WorkerHost:
    """Keeps a connection to the controller, and does what comes over it.

    A worker never outlives the connection that it was asked for on: whoever cannot hear the
    controller cannot know whether its requests have been given to others.
    """

    def __init__(
        self,
        join: Join,
        place: ControllerPlace,
        connect: Callable[[str], HostChannel],
        make_launcher: HereLauncher,
        stop: asyncio.Event,
        *,
        once: bool = False,
    ) -> None:
        """``once``: end where the connection ends, in place of making another."""
        self._join: Final = join
        self._place: Final = place
        self._connect: Final = connect
        self._make_launcher: Final = make_launcher
        self._stop: Final = stop
        self._once: Final = once
        self._news: Final = asyncio.Event()
        self._back_off: Final = BackOff(first_s=0.5, longest_s=10.0, healthy_s=10.0)
        self._launching: asyncio.Task[None] | None = None
        self._worker: HostedWorker | None = None
        self._refusal: str | None = None
        self._unwanted = ""
        self._had_place = False
        self._words: Final = RepeatedWords(_REPEAT_S)

    async def run(self) -> int:
        """Until a signal. Raises ConfigError where trying again is of no use."""
        stopping = asyncio.create_task(self._stop.wait())
        stopping.add_done_callback(lambda _: self._news.set())
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
        """Once, and then rarely: it is tried again all the time."""
        if self._words.worth_saying(reason, time.monotonic()):
            _logger.warning("%s", reason)

    async def _serve(self, channel: HostChannel) -> Lost:
        """Be a host on this connection, until it is of no more use."""
        loop = asyncio.get_running_loop()
        link = HostLink(
            self._join, self._place, heard_at=time.monotonic(), had_place=self._had_place
        )
        joined = False
        loop.add_reader(channel.descriptor, self._news.set)
        try:
            while True:
                self._news.clear()
                lost = self._turn(channel, link)
                if link.joined and not joined:
                    joined = self._had_place = True
                    self._words.forget()
                    place = self._place.endpoint
                    _logger.info("rank %s: has its place at %s", self._join.rank, place)
                if lost is not None:
                    return lost
                with suppress(TimeoutError):
                    async with asyncio.timeout(link.beat_s / 2):
                        await self._news.wait()
        finally:
            loop.remove_reader(channel.descriptor)

    def _turn(self, channel: HostChannel, link: HostLink) -> Lost | None:
        if self._stop.is_set():
            return Lost("it was asked to stop", final=False)
        for message in channel.drain():
            match link.take(message, time.monotonic()):
                case Launch() as launch:
                    if self._worker is not None or self._launching is not None:
                        return Lost("the controller launched a second worker", final=False)
                    self._launching = asyncio.create_task(self._start(launch))
                case SignalWorker() as wanted:
                    self._signal(wanted)
                case Lost() as lost:
                    return lost
                case None:
                    pass
                case other:
                    assert_never(other)
        if self._launching is not None and self._launching.done():
            launching, self._launching = self._launching, None
            launching.result()
        if self._refusal is not None:
            return Lost(self._refusal, final=True)
        ended = self._take_exit(channel)
        if ended is not None:
            return ended
        match link.due(time.monotonic(), channel.connection):
            case Lost() as lost:
                return lost
            case None:
                return None
            case word:
                channel.send(word)
                return None

    async def _start(self, launch: Launch) -> None:
        try:
            launcher = await asyncio.to_thread(self._make_launcher, launch)
            worker = HostedWorker(launch.identity, self._news.set)
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
            self._news.set()

    def _signal(self, wanted: SignalWorker) -> None:
        worker = self._worker
        if worker is None:
            # It may still be on its way.
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

    def _take_exit(self, channel: HostChannel) -> Lost | None:
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
            return Lost("the worker cannot run here: its last lines say why", final=True)
        return None

    async def _end_worker(self) -> None:
        """Leave nothing running. That we leave says it all: the end was no fault of the worker."""
        if self._launching is not None:
            launching, self._launching = self._launching, None
            await launching
        worker = self._worker
        if worker is None or worker.process is None:
            return
        worker.process.kill()
        while worker.status is None:
            self._news.clear()
            await self._news.wait()
        self._worker = None


class HostedWorker:
    """The worker that runs here, until its exit has been told."""

    def __init__(self, identity: str, tell: Callable[[], None]) -> None:
        self.identity: Final = identity
        self.process: WorkerProcess | None = None
        self.status: int | None = None
        self.signalled = False
        """The controller had it ended, so that a kill says nothing of memory."""
        self._tell: Final = tell

    def ended(self, status: int) -> None:
        self.status = status
        self._tell()


def _would_fail_again(status: int) -> bool:
    try:
        return ExitCode(status).would_fail_again
    except ValueError:
        return False
