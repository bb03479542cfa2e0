"""The start of a rank: its events while it waits for others, and limits divided by their number."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest

from mlx_dp.proto.capacity.ownership import divide_prefill
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Down, Shutdown, Start
from mlx_dp.proto.messages.events import Heartbeat, Hello, Ready, WorkerPhase
from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from mlx_dp.worker import startup
from mlx_dp.worker.channel import BufferedChannel, ShutdownRequestedError
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.heartbeat import StartHeartbeats
from tests.support.worker.fake_channel import FakeChannel, VirtualTime
from tests.support.worker.worker_bench import submit


def group_of(size: int) -> GroupPlace:
    return GroupPlace(
        backend=DistributedBackend.RING,
        rank=0,
        size=size,
        addresses=tuple(f"127.0.0.1:{5000 + rank}" for rank in range(size)),
        peers=tuple(f"ipc://{rank}" for rank in range(size)),
        generation=1,
    )


@pytest.mark.parametrize(("size", "chunk"), [(1, 512), (2, 256), (3, 170), (64, 8)])
def test_ranks_share_the_prompt_tokens_of_a_step(
    controller, worker_thread: Callable[[], Future[ExitCode]], shares, start_message, size, chunk
) -> None:
    start: Start = start_message(*shares(), heartbeat_interval_s=60.0)
    ended = worker_thread()
    controller.receive_until(Hello)
    # As the controller divides it.
    share = divide_prefill(start.chunked_prefill_size, ranks=size)
    controller.send(replace(start, group=group_of(size), chunked_prefill_size=share))
    controller.receive_until(Ready)
    controller.send(submit(1, prompt=2_000, max_tokens=1))
    while not (heartbeat := controller.receive_until(Heartbeat)).step_tokens:
        pass
    assert heartbeat.step_tokens == chunk
    controller.send(Shutdown())
    assert ended.result(timeout=200.0) is ExitCode.OK


def test_a_late_peer_is_named_as_often_as_a_heartbeat_is_due() -> None:
    time = VirtualTime()
    channel = FakeChannel(time)
    heartbeats = StartHeartbeats(BufferedChannel(channel), 1.0, time.clock)
    heartbeats.enter(WorkerPhase.WARMING)
    for _ in range(5):
        time.sleep(0.5)
        heartbeats.awaiting(2)
    told = [(heartbeat.phase, heartbeat.awaits_rank) for heartbeat in channel.sent_of(Heartbeat)]
    assert told == [(WorkerPhase.WARMING, rank) for rank in (None, 2, 2)]


def test_shutdown_ends_a_start_that_waits_for_a_peer(
    monkeypatch: pytest.MonkeyPatch, shares, start_message
) -> None:
    class Started(FakeChannel):
        def drain(self) -> list[Down]:
            return [commands.pop(0)] if commands else []

    def load(start: Start, heartbeats: StartHeartbeats, clock: Callable[[], float]) -> Engine:
        heartbeats.enter(WorkerPhase.FORMING)
        commands.append(Shutdown())
        heartbeats.awaiting(1)
        raise AssertionError("it goes on")

    commands: list[Down] = []
    monkeypatch.setattr(startup, "_load", load)
    channel = Started(VirtualTime())
    commands.append(start_message(*shares()))
    assert startup.run_worker(channel, clock=lambda: 0.0) is ExitCode.OK
    assert [message.tag for message in channel.sent] == ["hello", "heartbeat"]


def test_commands_during_the_start_are_handled_afterwards() -> None:
    channel = FakeChannel(VirtualTime())
    held = BufferedChannel(channel)
    channel.commands = [submit(1)]
    StartHeartbeats(held, 1.0, lambda: 0.0).awaiting(1)
    assert [command.tag for command in held.drain()] == ["submit"]
    channel.commands = [Shutdown()]
    with pytest.raises(ShutdownRequestedError):
        StartHeartbeats(held, 1.0, lambda: 0.0).awaiting(1)
