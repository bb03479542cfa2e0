"""The machine sleeps for an hour and wakes: no worker is judged by that hour.

On macOS the monotonic clock stands still in sleep, as on Linux. Where it does not, or where only
the controller stood still, it jumps.
"""

import pytest

from mlx_dp.orchestrator.api import Ended, ServiceStatus
from mlx_dp.orchestrator.control.state.owner import Hold
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import expected, generation

HOUR_S = 3600.0
WAKING_S = 1.4
"""From the controller's first tick to the workers' first heartbeats: fewer than four are missed."""


def fall_asleep(world: World, clock: str) -> None:
    """An hour without a tick, an arrival or a heartbeat."""
    if clock == "jumps":
        world.clock.now += HOUR_S


def assert_nobody_was_judged(world: World, first: list[int]) -> None:
    assert [worker.pid for worker in world.alive()] == first
    assert not any(worker.signals for worker in world.workers)
    assert world.core.counters.worker_deaths == 0
    assert world.core.status() is ServiceStatus.READY
    assert not any(Hold.SUSPICIOUS in owner.holds for owner in world.core.ranks.owners())


@pytest.mark.parametrize("clock", ["stands still", "jumps"])
@pytest.mark.parametrize("group", [False, True], ids=["replicas", "group"])
def test_workers_that_wake_after_the_controller_are_not_late(clock: str, group: bool) -> None:
    # A client's own time goes on while the machine sleeps.
    patient = QueueOptions(request_timeout_s=2 * HOUR_S)
    world = World(serve_options(2, group=group, queue=patient)).bring_up()
    first = [worker.pid for worker in world.alive()]
    readers = [Reader(world.core.submit(generation(seed=seed, max_tokens=8))) for seed in (1, 2)]
    world.run_workers(2)
    world.pass_time(1.0)
    fall_asleep(world, clock)
    world.pass_time(WAKING_S, heartbeats=False)
    assert_nobody_was_judged(world, first)
    for _ in range(8):
        world.run_workers()
        world.pass_time(1.0)
    world.pass_time(30.0)
    assert_nobody_was_judged(world, first)
    for seed, reader in zip((1, 2), readers, strict=True):
        assert reader.read().ended == Ended(reason=FinishReason.LENGTH)
        assert reader.ids == expected(generation(seed=seed), 8)
        assert len(reader.grants) == 1


@pytest.mark.parametrize("clock", ["stands still", "jumps"])
def test_heartbeats_that_come_before_the_first_tick_change_nothing(clock: str) -> None:
    world = World().bring_up()
    first = [worker.pid for worker in world.alive()]
    world.pass_time(1.0)
    fall_asleep(world, clock)
    for worker in world.alive():
        worker.send_heartbeat()
    world.core.on_arrival()
    world.pass_time(30.0)
    assert_nobody_was_judged(world, first)


@pytest.mark.parametrize("clock", ["stands still", "jumps"])
def test_one_that_sleeps_on_after_the_others_is_judged_by_its_own_silence(clock: str) -> None:
    world = World().bring_up()
    world.pass_time(1.0)
    world.worker(1).stopped = True
    fall_asleep(world, clock)
    world.pass_time(9.5)
    assert world.worker(1).alive
    world.pass_time(1.5)
    assert world.core.supervisor.workers[1].last_cause.startswith("not heard for 10")
    assert world.worker(0).alive
    assert world.worker(0).signals == []


@pytest.mark.parametrize("clock", ["stands still", "jumps"])
def test_a_start_goes_on_where_it_was(clock: str) -> None:
    world = World(serve_options(1))
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.settle()
    world.pass_time(300.0)
    fall_asleep(world, clock)
    world.pass_time(290.0)
    assert world.worker(0).signals == []
    world.worker(0).become_ready()
    world.settle()
    assert world.core.status() is ServiceStatus.READY
