"""Workers on other machines, from the controller's side: a wire and hosts of the test's own."""

import asyncio

import pytest

from mlx_dp.orchestrator.process.remote.host_table import HostTimes
from mlx_dp.orchestrator.process.remote.remote_launcher import RemoteLauncher, RemoteModel
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.host_messages import (
    Join,
    Launch,
    Ping,
    SignalWorker,
    Welcome,
    WorkerExited,
)
from mlx_dp.proto.wire.router_socket import NotConnectedError, PeerCongestedError

JOIN = Join(rank=1, host="mac2", pid=7)
LINK = "host-1-a"


class Wire:
    def __init__(self) -> None:
        self.sent: list = []
        self.fails: Exception | None = None

    def hear_hosts(self, take) -> None:
        self.say = take

    def send_host(self, identity: str, message) -> None:
        if self.fails is not None:
            raise self.fails
        self.sent.append((identity, message))


class Local:
    def __init__(self) -> None:
        self.spawned: list = []

    def spawn(self, index, identity, endpoint, on_exit):
        self.spawned.append((index, identity, endpoint))
        return "a local process"


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.wire, self.local = Wire(), Local()
        self.exits: list[int] = []
        self.launcher = RemoteLauncher(
            self.local,
            self.wire,
            frozenset({1}),
            RemoteModel(path="/m", fingerprint="f", log_level="info"),
            HostTimes(heartbeat_s=0.5, silence_s=5.0),
            clock=lambda: self.now,
        )

    def join(self) -> None:
        self.wire.say(LINK, JOIN)
        assert isinstance(self.wire.sent.pop()[1], Welcome)

    def spawn(self, identity: str = "w1-a"):
        return self.launcher.spawn(1, identity, "ipc://here", self.exits.append)

    def tick(self) -> None:
        """One run of the timer, without a loop that waits."""

        async def turn() -> None:
            self.launcher._heartbeat()
            self.launcher.stop()

        asyncio.run(turn())


@pytest.fixture
def world() -> World:
    return World()


def test_a_worker_of_ours_is_started_here(world) -> None:
    assert world.launcher.host_of(0) == ""
    process = world.launcher.spawn(0, "w0-a", "ipc://here", world.exits.append)
    assert process == "a local process"
    assert world.local.spawned == [(0, "w0-a", "ipc://here")]


def test_a_remote_worker_goes_to_the_host_that_has_joined_for_it(world) -> None:
    assert world.launcher.host_of(1) is None
    with pytest.raises(OSError, match="no host has joined for rank 1"):
        world.spawn()
    world.join()
    assert world.launcher.host_of(1) == "mac2"
    assert world.spawn().pid == 7
    launch = Launch(identity="w1-a", model_path="/m", model_fingerprint="f", log_level="info")
    assert world.wire.sent == [(LINK, launch)]


@pytest.mark.parametrize("error", [NotConnectedError("gone"), PeerCongestedError("full")])
def test_a_host_that_does_not_get_the_order_makes_no_process(world, error) -> None:
    world.join()
    world.wire.fails = error
    with pytest.raises(OSError, match="mac2 cannot be reached"):
        world.spawn()
    world.wire.fails = None
    world.spawn()


def test_its_exit_is_what_the_host_says(world) -> None:
    world.join()
    world.spawn()
    world.wire.say(LINK, WorkerExited(identity="w1-a", status=3))
    assert world.exits == [3]
    world.spawn("w1-b")


def test_a_kill_is_an_order_to_the_host_until_it_has_ended(world) -> None:
    world.join()
    process = world.spawn()
    world.wire.sent.clear()
    process.abort()
    process.kill()
    assert world.wire.sent == [
        (LINK, SignalWorker(identity="w1-a", signal=number)) for number in (6, 9)
    ]
    world.wire.say(LINK, WorkerExited(identity="w1-a", status=-9))
    process.kill()
    assert len(world.wire.sent) == 2


def test_a_silent_host_counts_as_the_end_of_its_worker(world) -> None:
    world.join()
    world.spawn()
    world.launcher._expected_at = world.now = 5.1
    world.tick()
    assert world.exits == [ExitCode.HOST_LOST]
    assert world.launcher.host_of(1) is None


def test_a_host_is_not_silent_because_the_controller_slept(world) -> None:
    world.join()
    world.spawn()
    world.launcher._expected_at, world.now = 0.5, 60.0
    world.tick()
    assert world.exits == []
    assert world.wire.sent[-1] == (LINK, Ping())


def test_a_host_without_a_connection_is_given_up_at_once(world) -> None:
    world.join()
    process = world.spawn()
    world.wire.fails = NotConnectedError("gone")
    process.kill()
    assert world.exits == [ExitCode.HOST_LOST]


def test_a_message_that_cannot_be_read_changes_nothing(world, caplog) -> None:
    world.join()
    world.spawn()
    world.wire.say(LINK, ProtocolError("malformed"))
    assert "dropped a message of host-1-a" in caplog.text
    assert world.exits == []
