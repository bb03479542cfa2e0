"""A host against a channel and workers of the test's own, driven by the event loop only."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

import pytest

from mlx_dp.orchestrator.process.remote.host_link import ControllerPlace
from mlx_dp.orchestrator.process.remote.worker_host import LogThrottle, WorkerHost
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.host_messages import (
    Deny,
    Join,
    Launch,
    Leave,
    SignalWorker,
    Welcome,
    WorkerExited,
)
from mlx_dp.proto.wire.connection_state import ConnectionState

PLACE = ControllerPlace(endpoint="tcp://there:1")
JOIN = Join(rank=1, host="mac2", pid=7)
WELCOME = Welcome(heartbeat_s=60.0, silence_s=600.0)
LAUNCH = Launch(identity="w1-a", model_path="", model_fingerprint="", log_level="info")
GONE = Deny(reason="the controller had not heard it", final=False)


class Channel:
    """Delivers its messages, one per loop run, and wakes the host for each."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.said: list = []
        self.news: list = []
        self.closed = False
        self.connection = ConnectionState.READY
        self.on_say: Callable[[object], None] = lambda message: None
        self.descriptor, self._write = os.pipe()

    def tell(self, message: object) -> None:
        self.news.append(message)
        os.write(self._write, b"x")

    def drain(self) -> list:
        told, self.news = self.news, []
        for _ in told:
            os.read(self.descriptor, 1)
        return told

    def send(self, message: object) -> None:
        self.said.append(message)
        self.on_say(message)

    def close(self, *, linger_s: float = 0.0) -> None:
        self.closed = True
        os.close(self.descriptor)
        os.close(self._write)


class Worker:
    pid = 8

    def __init__(self, identity: str, on_exit: Callable[[int], None]) -> None:
        self.identity = identity
        self.on_exit = on_exit
        self.signals: list[str] = []

    def abort(self) -> None:
        self.signals.append("abort")

    def kill(self) -> None:
        self.signals.append("kill")
        asyncio.get_running_loop().call_soon(self.on_exit, -9)


class World:
    """``script`` acts on each channel as it is made."""

    def __init__(self, script: Callable[["World", Channel], None], *, once: bool = True) -> None:
        self.channels: list[Channel] = []
        self.workers: list[Worker] = []
        self.refusal: str | None = None
        self.stop = asyncio.Event()
        self._script = script
        self.host = WorkerHost(JOIN, PLACE, self._connect, self._launcher, self.stop, once=once)

    def _connect(self, identity: str) -> Channel:
        channel = Channel(identity)
        self.channels.append(channel)
        self._script(self, channel)
        return channel

    def _launcher(self, launch: Launch) -> "World":
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        return self

    def spawn(self, index, identity, endpoint, on_exit) -> Worker:
        assert (index, endpoint) == (1, "tcp://there:1")
        worker = Worker(identity, on_exit)
        self.workers.append(worker)
        self.on_spawn(worker)
        return worker

    def on_spawn(self, worker: Worker) -> None:
        """For a test to set."""

    def run(self) -> int:
        async def run() -> int:
            async with asyncio.timeout(30.0):
                return await self.host.run()

        return asyncio.run(run())


def later(act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(act)


def launched(channel: Channel) -> None:
    channel.tell(WELCOME)
    channel.tell(LAUNCH)


def test_it_asks_for_its_place_runs_the_worker_and_tells_its_exit() -> None:
    world = World(lambda world, channel: launched(channel))
    world.on_spawn = lambda worker: later(lambda: worker.on_exit(-11))

    def on_say(message: object) -> None:
        if isinstance(message, WorkerExited):
            world.channels[0].tell(GONE)

    world._script = lambda world, channel: (launched(channel), setattr(channel, "on_say", on_say))
    assert world.run() == ExitCode.PARENT_GONE
    (channel,) = world.channels
    assert [worker.identity for worker in world.workers] == ["w1-a"]
    exited = WorkerExited(identity="w1-a", status=-11)
    assert [said for said in channel.said if isinstance(said, WorkerExited)] == [exited]
    assert channel.closed


def test_its_log_says_that_it_has_its_place_and_what_it_runs(caplog) -> None:
    caplog.set_level(logging.INFO)
    world = World(lambda world, channel: launched(channel))
    world.on_spawn = lambda worker: world.channels[0].tell(GONE)
    world.run()
    assert caplog.text.count("rank 1: has joined tcp://there:1") == 1
    assert "worker w1-a: started, pid 8" in caplog.text


def test_the_same_trouble_is_told_once_while_it_is_tried_again(caplog) -> None:
    taken = Deny(reason="--rank 1 is taken by mac1", final=False)

    def script(world: World, channel: Channel) -> None:
        channel.tell(taken)
        if len(world.channels) == 3:
            later(world.stop.set)

    world = World(script, once=False)
    world.host._back_off.first_s = 0.0
    assert world.run() == ExitCode.OK
    assert len(world.channels) >= 3
    assert caplog.text.count("--rank 1 is taken by mac1") == 1


@pytest.mark.parametrize("asked", [True, False])
def test_only_an_unrequested_kill_mentions_memory(caplog, asked) -> None:
    caplog.set_level(logging.INFO)
    world = World(lambda world, channel: launched(channel))

    def on_say(message: object) -> None:
        if isinstance(message, WorkerExited):
            world.channels[0].tell(GONE)

    def on_spawn(worker: Worker) -> None:
        channel = world.channels[0]
        channel.on_say = on_say
        if asked:
            channel.tell(SignalWorker(identity="w1-a", signal=9))
        else:
            later(lambda: worker.on_exit(-9))

    world.on_spawn = on_spawn
    world.run()
    assert "killed by SIGKILL" in caplog.text
    assert ("out of memory" in caplog.text) is not asked


def test_a_worker_does_not_outlive_the_connection_it_was_asked_for_on() -> None:
    world = World(lambda world, channel: launched(channel))
    world.on_spawn = lambda worker: world.channels[0].tell(GONE)
    assert world.run() == ExitCode.PARENT_GONE
    assert world.workers[0].signals == ["kill"]
    # Its exit is not its own: the controller gets the host's leave.
    assert [type(said) for said in world.channels[0].said][-1] is Leave
    assert not any(isinstance(said, WorkerExited) for said in world.channels[0].said)


def test_without_once_it_comes_back_under_a_new_identity() -> None:
    def script(world: World, channel: Channel) -> None:
        if len(world.channels) == 1:
            channel.tell(GONE)
        else:
            world.stop.set()

    world = World(script, once=False)
    assert world.run() == ExitCode.OK
    first, second = world.channels
    assert first.identity != second.identity
    assert first.closed
    assert second.closed


@pytest.mark.parametrize(("number", "signal"), [(6, "abort"), (9, "kill")])
def test_signals_reach_the_worker_that_they_name(number: int, signal: str) -> None:
    world = World(lambda world, channel: launched(channel))

    def on_spawn(worker: Worker) -> None:
        channel = world.channels[0]
        channel.tell(SignalWorker(identity="w1-other", signal=number))
        channel.tell(SignalWorker(identity="w1-a", signal=number))
        channel.tell(GONE)

    world.on_spawn = on_spawn
    world.run()
    assert world.workers[0].signals[0] == signal
    assert len(world.workers[0].signals) == 2


def test_a_kill_that_comes_before_the_process_ends_it_as_soon_as_it_is_there() -> None:
    def script(world: World, channel: Channel) -> None:
        launched(channel)
        channel.tell(SignalWorker(identity="w1-a", signal=9))

    world = World(script)
    told = []

    def on_say(message: object) -> None:
        if isinstance(message, WorkerExited):
            told.append(message)
            world.channels[0].tell(GONE)

    world.on_spawn = lambda worker: setattr(world.channels[0], "on_say", on_say)
    world.run()
    assert told == [WorkerExited(identity="w1-a", status=-9)]
    assert world.workers[0].signals == ["kill"]


def test_what_this_machine_has_not_ends_it_with_the_reason() -> None:
    world = World(lambda world, channel: launched(channel))
    world.refusal = "this machine has no model directory /m"
    with pytest.raises(ConfigError, match="no model directory /m"):
        world.run()
    assert world.channels[0].said[-1] == Leave(reason="this machine has no model directory /m")


def test_a_worker_that_would_fail_again_ends_it() -> None:
    world = World(lambda world, channel: launched(channel))
    world.on_spawn = lambda worker: later(lambda: worker.on_exit(ExitCode.UNSUPPORTED_MODEL))
    with pytest.raises(ConfigError, match="cannot run here"):
        world.run()
    exited = WorkerExited(identity="w1-a", status=ExitCode.UNSUPPORTED_MODEL)
    assert exited in world.channels[0].said


def test_a_rank_that_is_not_for_it_ends_it() -> None:
    deny = Deny(reason="rank 1 is not for another machine", final=True)
    world = World(lambda world, channel: channel.tell(deny), once=False)
    with pytest.raises(ConfigError, match="rank 1 is not for another machine"):
        world.run()


def test_a_signal_ends_the_worker_and_says_so() -> None:
    world = World(lambda world, channel: launched(channel), once=False)
    world.on_spawn = lambda worker: world.stop.set()
    assert world.run() == ExitCode.OK
    assert world.workers[0].signals == ["kill"]
    assert world.channels[0].said[-1] == Leave(reason="it was asked to stop")


def test_a_second_worker_at_once_is_refused() -> None:
    world = World(lambda world, channel: launched(channel))
    world.on_spawn = lambda worker: world.channels[0].tell(LAUNCH)
    with suppress(ConfigError):
        assert world.run() == ExitCode.PARENT_GONE
    assert len(world.workers) == 1


def test_a_sentence_is_said_again_after_a_long_time_or_a_change() -> None:
    words = LogThrottle(600.0)
    assert words.admit("a", 0.0)
    assert not words.admit("a", 599.0)
    assert words.admit("b", 599.0)
    assert words.admit("a", 600.0)
    words.reset()
    assert words.admit("a", 601.0)
