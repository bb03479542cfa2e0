"""The loop of a rank: its part in peers' passes, and its heartbeats while it waits for a peer."""

from collections.abc import Callable

import pytest

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Shutdown
from mlx_dp.proto.messages.events import (
    Failed,
    FailureKind,
    Heartbeat,
    PassTotals,
    Rejected,
    Tokens,
)
from mlx_dp.worker.contract.engine import Drawn, StepPlan
from mlx_dp.worker.contract.peers import PassWatch, RankLostError
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.fake_channel import FakeChannel
from tests.support.worker.worker_bench import Bench, submit

FD = 77


class FakePeers:
    """Want as many passes as the test demands, of this many tokens each."""

    fd = FD
    totals = PassTotals(passes=0, idle_passes=0, waited_s=0.0)

    def __init__(self) -> None:
        self.wants = 0
        self.tokens = 8
        self.taken = 0
        self.told: PassWatch | None = None

    def poll_wanted(self) -> bool:
        return self.wants > 0

    def take_part(self) -> None:
        assert self.told is not None
        self.wants -= 1
        self.taken += 1
        self.told.agreed(self.tokens)

    def watch(self, watch: PassWatch) -> None:
        self.told = watch

    def close(self) -> None: ...


class RankChannel(FakeChannel):
    """Records the descriptors on which the loop waits beside the controller's."""

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        assert beside == FD
        return super().wait(timeout_s)


class RankEngine(FakeEngine):
    """``in_step`` is called in the middle of each step, where a pass would be agreed on."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._ranks = FakePeers()
        self.in_step: Callable[[PassWatch], None] = lambda watch: None

    @property
    def peers(self) -> FakePeers:
        return self._ranks

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        assert self._ranks.told is not None
        self.in_step(self._ranks.told)
        return super().step(plan)


@pytest.fixture
def bench() -> Bench:
    return Bench(engine=RankEngine, channel=RankChannel)


def test_an_idle_rank_takes_part_as_often_as_its_peers_want(bench: Bench) -> None:
    bench.engine.peers.wants = 3
    for _ in range(5):
        assert bench.run_once() == []
    assert bench.engine.peers.taken == 3
    assert bench.channel.waits == [1.0, 1.0]


def test_a_rank_whose_controller_does_not_read_takes_part_all_the_same(bench: Bench) -> None:
    bench.run_once(submit(1, max_tokens=50))
    bench.channel.congested = True
    bench.engine.peers.wants = 2
    for _ in range(3):
        assert bench.run_once() == []
    assert bench.engine.peers.taken == 2
    assert len(bench.channel.waits) == 1


def test_a_busy_rank_has_passes_of_its_own(bench: Bench) -> None:
    bench.run_once(submit(1, max_tokens=50))
    bench.engine.peers.wants = 2
    for _ in range(5):
        bench.run_once()
    assert bench.engine.peers.taken == 0


def test_the_tokens_of_peers_are_told_before_their_pass_is_computed(bench: Bench) -> None:
    bench.engine.peers.wants, bench.engine.peers.tokens = 1, 512
    bench.loop.run_once()
    assert [heartbeat.step_tokens for heartbeat in bench.channel.sent_of(Heartbeat)] == [0, 512]
    # The pass may still be in flight, and is over only when nothing follows.
    bench.time.sleep(1.0)
    bench.loop.run_once()
    assert bench.channel.sent_of(Heartbeat)[-1].step_tokens == 512
    bench.loop.run_once()
    assert bench.channel.sent_of(Heartbeat)[-1].step_tokens == 0


def test_the_passes_of_one_step_add_up(bench: Bench) -> None:
    bench.engine.in_step = lambda watch: [watch.agreed(100), watch.agreed(20)]
    bench.channel.commands = [submit(1, prompt=10)]
    bench.loop.run_once()
    assert bench.channel.sent_of(Heartbeat)[-1].step_tokens == 130


def test_heartbeats_tell_of_the_passes_so_far(bench: Bench) -> None:
    bench.engine.peers.totals = PassTotals(passes=9, idle_passes=4, waited_s=0.5)
    bench.loop.run_once()
    assert bench.channel.sent_of(Heartbeat)[-1].passes == bench.engine.peers.totals


def test_while_it_waits_for_a_peer_a_rank_sends_heartbeats_that_name_it(bench: Bench) -> None:
    def late(watch: PassWatch) -> None:
        for _ in range(6):
            bench.time.sleep(0.5)
            watch.awaiting(3)

    bench.engine.in_step = late
    bench.channel.commands = [submit(1)]
    bench.loop.run_once()
    heartbeats = bench.channel.sent_of(Heartbeat)
    assert [heartbeat.awaits_rank for heartbeat in heartbeats[:4]] == [None, 3, 3, 3]
    assert {heartbeat.step for heartbeat in heartbeats[:4]} == {0}
    bench.engine.in_step = lambda watch: None
    bench.time.sleep(1.0)
    bench.loop.run_once()
    assert bench.channel.sent_of(Heartbeat)[-1].awaits_rank is None


def test_commands_during_a_wait_are_handled_after_the_step(bench: Bench) -> None:
    def late(watch: PassWatch) -> None:
        bench.channel.commands.append(submit(2))
        watch.awaiting(1)
        bench.engine.in_step = lambda watch: None

    bench.engine.in_step = late
    assert [message.tag for message in bench.run_once(submit(1, max_tokens=50))] == ["accepted"]
    accepted, *_ = bench.run_once()
    assert not isinstance(accepted, Rejected)
    assert (accepted.tag, accepted.request_id) == ("accepted", 2)


def test_shutdown_ends_a_wait_for_a_peer(bench: Bench) -> None:
    def late(watch: PassWatch) -> None:
        bench.channel.commands.append(Shutdown())
        watch.awaiting(1)
        raise AssertionError("the wait goes on")

    bench.engine.in_step = late
    bench.channel.commands = [submit(1)]
    assert bench.loop.run() is ExitCode.OK
    assert not bench.channel.sent_of(Failed)


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (
            RankLostError("rank 2 did not come", 2),
            Failed(kind=FailureKind.PEER_LOST, message="rank 2 did not come", lost_rank=2),
        ),
        (
            RuntimeError("[ring] connection to a peer was lost"),
            Failed(
                kind=FailureKind.PEER_LOST,
                message="RuntimeError: [ring] connection to a peer was lost",
            ),
        ),
    ],
)
def test_a_lost_peer_is_told_as_such(
    bench: Bench, error: Exception, failed: Failed, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(watch: PassWatch) -> None:
        raise error

    bench.engine.in_step = lost
    bench.channel.commands = [submit(1)]
    assert bench.loop.run() is ExitCode.PEER_LOST
    assert bench.channel.sent_of(Failed) == [failed]
    assert not bench.channel.sent_of(Tokens)
    assert not any(record.exc_info for record in caplog.records), "a trace would mislead"
