"""A grant that is not accepted in time is withdrawn, if another owner could run the request."""

import pytest

from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import expected, generation


def submit(world: World, seed: int = 0, rank: int | None = None, max_tokens: int = 30) -> Reader:
    return Reader(world.core.submit(generation(seed=seed, rank=rank, max_tokens=max_tokens)))


def stuck_world(owners: int = 2) -> World:
    """Owner 0 has just been granted a request, during a long step that it had announced."""
    world = World(serve_options(owners)).bring_up()
    world.worker(0).send_heartbeat(step_tokens=512)
    world.core.on_arrival()
    world.worker(0).stopped = True
    return world


def test_a_request_moves_on_when_its_owner_does_not_take_it_in_time() -> None:
    world = stuck_world()
    reader = submit(world)
    world.pass_time(9.9)
    assert [grant.dp_rank for grant in reader.read().grants] == [0]
    world.pass_time(0.3)
    assert [grant.dp_rank for grant in reader.read().grants] == [0, 1]
    assert world.worker(0).alive
    assert world.core.counters.grants_withdrawn == 1
    world.run_workers(30)
    assert reader.read().ended is not None
    assert reader.ids == expected(generation(), 30)


def test_later_events_of_the_late_owner_change_nothing_but_free_its_slot() -> None:
    world = stuck_world()
    reader = submit(world)
    world.pass_time(10.2)
    world.run_workers(5)
    owner = world.core.ranks.get(0)
    assert owner is not None
    assert owner.grants, "its slot is not free before it says so"
    world.worker(0).stopped = False
    world.run_workers(2)
    assert not owner.grants
    world.run_workers(30)
    assert reader.read().ended is not None
    assert reader.ended.reason is FinishReason.LENGTH
    assert reader.ids == expected(generation(), 30)
    assert world.core.counters.generated_by_owner[0] == 0


def test_late_tokens_of_the_withdrawn_grant_are_dropped() -> None:
    world = stuck_world()
    reader = submit(world)
    world.pass_time(10.2)
    # The abort is in flight while it runs the request for a few steps.
    world.worker(0).commands.pop()
    world.worker(0).stopped = False
    world.run_workers(10)
    assert world.worker(0).running
    assert reader.read().ids == expected(generation(), 10)
    assert world.core.counters.generated_by_owner[0] == 0


def test_it_is_not_given_back_to_the_owner_that_still_holds_it() -> None:
    world = stuck_world()
    reader = submit(world)
    world.pass_time(10.2)
    world.run_workers(2)
    world.worker(1).die(-9)
    world.worker(0).stopped = False
    world.worker(0).send_heartbeat()
    world.core.on_arrival()
    world.pass_time(0.1)
    assert [grant.dp_rank for grant in reader.read().grants] == [0, 1]
    world.run_workers(1)
    assert [grant.dp_rank for grant in reader.read().grants] == [0, 1, 0]


def test_the_owner_may_be_lost_while_it_holds_a_withdrawn_grant() -> None:
    world = stuck_world()
    reader = submit(world)
    world.pass_time(10.2)
    world.worker(0).die(-9)
    world.pass_time(0.2)
    world.run_workers(30)
    assert reader.read().ended is not None
    assert reader.ids == expected(generation(), 30)
    assert world.core.counters.requests_replayed == 0


@pytest.mark.parametrize("why", ["alone", "pinned", "full"])
def test_it_stays_when_no_other_owner_could_run_it(why: str) -> None:
    world = stuck_world(1 if why == "alone" else 2)
    if why == "full":
        for seed in range(1, 3):
            submit(world, seed, rank=1, max_tokens=900)
    reader = submit(world, rank=0 if why == "pinned" else None)
    for _ in range(20):
        world.run_workers()
        world.pass_time(1.0)
    assert [grant.dp_rank for grant in reader.read().grants] == [0]
    assert world.core.counters.grants_withdrawn == 0


def test_time_that_the_controller_slept_makes_no_grant_late() -> None:
    world = World().bring_up()
    reader = submit(world)
    world.clock.now += 60.0
    world.core.tick()
    assert len(reader.read().grants) == 1
    assert world.core.counters.grants_withdrawn == 0
