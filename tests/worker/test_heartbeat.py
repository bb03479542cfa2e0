"""Heartbeats are sent when due, and before the controller must allow more time."""

import pytest

from mlx_dp.proto.messages.commands import Shutdown
from mlx_dp.proto.messages.events import Heartbeat, WorkerPhase
from mlx_dp.worker.channel import BufferedChannel, ShutdownRequestedError
from mlx_dp.worker.heartbeat import HeartbeatSchedule, LoopHeartbeats, StartHeartbeats
from mlx_dp.worker.scheduling.step_timer import StepTime
from tests.support.worker.fake_channel import FakeChannel, VirtualTime
from tests.support.worker.worker_bench import Bench

INTERVAL_S = 1.0


class Starting:
    def __init__(self) -> None:
        self.time = VirtualTime()
        self.channel = FakeChannel(self.time)
        self.heartbeats = StartHeartbeats(
            BufferedChannel(self.channel), INTERVAL_S, self.time.clock
        )

    def sent(self) -> list[tuple[WorkerPhase, int | None]]:
        found = [message for message in self.channel.take() if isinstance(message, Heartbeat)]
        return [(heartbeat.phase, heartbeat.awaits_rank) for heartbeat in found]


class Looping:
    def __init__(self) -> None:
        bench = Bench()
        self.time, self.channel = bench.time, bench.channel
        self.heartbeats = LoopHeartbeats(
            BufferedChannel(bench.channel),
            bench.engine,
            bench.scheduler,
            HeartbeatSchedule(INTERVAL_S, lambda: 4_096),
            bench.time.clock,
        )
        assert self.heartbeats.send_if_due()
        self.channel.take()

    def sent(self) -> list[Heartbeat]:
        return [message for message in self.channel.take() if isinstance(message, Heartbeat)]


def test_a_start_reports_each_phase_as_it_begins() -> None:
    start = Starting()
    start.heartbeats.enter(WorkerPhase.LOADING)
    start.heartbeats.enter(WorkerPhase.WARMING)
    assert start.sent() == [(WorkerPhase.LOADING, None), (WorkerPhase.WARMING, None)]


def test_a_start_names_the_late_rank_once_an_interval() -> None:
    start = Starting()
    start.heartbeats.enter(WorkerPhase.FORMING)
    start.sent()
    start.heartbeats.awaiting(1)
    assert start.sent() == []
    start.time.now += INTERVAL_S
    start.heartbeats.awaiting(1)
    start.heartbeats.awaiting(1)
    assert start.sent() == [(WorkerPhase.FORMING, 1)]


def test_shutdown_ends_a_start_that_waits_for_a_rank() -> None:
    start = Starting()
    start.heartbeats.enter(WorkerPhase.FORMING)
    start.channel.commands.append(Shutdown())
    with pytest.raises(ShutdownRequestedError):
        start.heartbeats.awaiting(1)


def test_the_loop_sends_one_heartbeat_an_interval() -> None:
    loop = Looping()
    assert not loop.heartbeats.send_if_due()
    loop.time.now += INTERVAL_S
    assert loop.heartbeats.send_if_due()
    assert not loop.heartbeats.send_if_due()
    assert len(loop.sent()) == 1


def test_a_heartbeat_that_was_made_due_is_sent_at_once() -> None:
    schedule = HeartbeatSchedule(INTERVAL_S, lambda: 4_096)
    bench = Bench()
    loop = LoopHeartbeats(
        BufferedChannel(bench.channel), bench.engine, bench.scheduler, schedule, bench.time.clock
    )
    loop.send_if_due()
    assert loop.due_in == INTERVAL_S
    schedule.make_due()
    assert loop.due_in == 0.0


def test_a_step_with_a_prompt_is_reported_before_it_runs() -> None:
    loop = Looping()
    loop.heartbeats.begin_step(100)
    assert [heartbeat.step_tokens for heartbeat in loop.sent()] == [100]
    loop.heartbeats.launched(60)
    assert loop.sent() == []
    loop.heartbeats.launched(0)
    assert [(heartbeat.step, heartbeat.step_tokens) for heartbeat in loop.sent()] == [(2, 0)]


def test_tokens_of_peers_count_like_own_ones() -> None:
    loop = Looping()
    loop.heartbeats.begin_step(100)
    loop.heartbeats.agreed(200)
    assert [heartbeat.step_tokens for heartbeat in loop.sent()] == [100, 300]


def test_a_measured_step_sets_the_pace_of_prompt_tokens() -> None:
    loop = Looping()
    loop.heartbeats.measured(StepTime(duration_s=2.0, prefilled=100, decoded=1))
    loop.time.now += INTERVAL_S
    loop.heartbeats.send_if_due()
    assert [heartbeat.prefill_token_s for heartbeat in loop.sent()] == [0.02]
