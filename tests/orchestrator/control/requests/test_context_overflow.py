"""The length of a response: its owner's remaining space, wherever it runs and after losses."""

import pytest

from mlx_dp.orchestrator.api import Ended, RefusedError
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.workers.supervisor import SupervisorLimits
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.restart_budget import RestartLimits
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import expected, generation, ready

LENGTH = Ended(reason=FinishReason.LENGTH)
STRICT = QueueOptions(strict_max_tokens=True)
NO_RESTART = ControlLimits(supervisor=SupervisorLimits(restart=RestartLimits(max_restarts=0)))


def submit(world: World, *args, **kwargs) -> Reader:
    return Reader(world.core.submit(generation(*args, **kwargs)))


def world_of(*pools: int, queue: QueueOptions | None = None, **arguments) -> World:
    """Owners whose context of 1000 tokens their pools do not hold."""
    world = World(serve_options(len(pools), queue=queue), **arguments)
    world.readies = {index: ready(pool=pool) for index, pool in enumerate(pools)}
    return world


@pytest.mark.parametrize("asked", [18, 19, 1000, 2**62, None])
def test_an_answer_ends_with_length_where_the_pool_ends(asked: int | None) -> None:
    world = world_of(20).bring_up()
    reader = submit(world, (1, 2, 3), asked)
    world.run_workers(30)
    assert reader.read().ended == LENGTH
    assert len(reader.ids) == 18


def test_a_context_that_is_smaller_than_the_pool_ends_it_too() -> None:
    world = World(serve_options(1))
    world.readies = {0: ready(pool=1000, context=12)}
    reader = submit(world.bring_up(), (1, 2, 3), 500)
    world.run_workers(20)
    assert reader.read().ended == LENGTH
    assert len(reader.ids) == 9


def test_strict_services_refuse_what_others_cut() -> None:
    world = world_of(20, queue=STRICT).bring_up()
    with pytest.raises(RefusedError, match="maximum context length is 21 tokens") as refused:
        submit(world, (1, 2, 3), 19)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")
    submit(world, (1, 2, 3), 18)
    submit(world, (1, 2, 3), None)


def test_an_answer_for_one_rank_is_cut_to_what_that_one_holds() -> None:
    world = world_of(40, 20).bring_up()
    wide, narrow = (submit(world, (1, 2, 3), 500, rank=rank) for rank in (0, 1))
    world.run_workers(50)
    assert [len(reader.read().ids) for reader in (wide, narrow)] == [38, 18]
    with pytest.raises(RefusedError, match="maximum context length is 21 tokens"):
        submit(world, (1,) * 21, 1, rank=1)


def test_an_answer_that_one_owner_can_hold_whole_is_not_cut_for_another() -> None:
    world = world_of(20, 40).bring_up()
    readers = [submit(world, (1, 2, 3), 30) for _ in range(3)]
    world.run_workers(120)
    assert [len(reader.read().ids) for reader in readers] == [30] * 3
    assert {grant.dp_rank for reader in readers for grant in reader.grants} == {1}


def test_a_replay_ends_where_the_answer_would_have() -> None:
    world = world_of(20, 20).bring_up()
    reader = submit(world, (1, 2, 3), 500)
    world.run_workers(5)
    first = reader.read().grants[0].dp_rank
    world.worker(first).die(-9)
    world.pass_time(0.1)
    world.run_workers(40)
    assert reader.read().ended == LENGTH
    assert reader.ids == expected(generation(), 18)
    assert [grant.dp_rank for grant in reader.grants] == [first, 1 - first]


def test_a_replay_waits_for_the_owner_that_can_hold_all_of_it() -> None:
    world = world_of(20, 40).bring_up()
    reader = submit(world, (1, 2, 3), 500, rank=1)
    world.run_workers(5)
    world.worker(1).die(-9)
    world.pass_time(0.1)
    world.run_workers(40)
    assert reader.read().ended is None
    world.recover()
    world.run_workers(60)
    assert reader.read().ended == LENGTH
    assert reader.ids == expected(generation(), 38)


def test_limits_are_those_of_the_largest_owner_that_is_there_or_will_be_back() -> None:
    world = world_of(20, 40)
    world.auto_ready = False
    world.core.begin()
    assert world.core.ranks.limits() is None
    seen = []
    for index in (0, 1):
        world.settle()
        world.worker(index).hello()
        world.settle()
        world.worker(index).become_ready()
        world.settle()
        limits = world.core.ranks.limits()
        assert limits is not None
        seen.append(limits.max_request_tokens)
    assert seen == [21, 41]
    world.worker(1).die(-9)
    world.pass_time(0.1)
    limits = world.core.ranks.limits()
    assert limits is not None
    assert limits.max_request_tokens == 41
    # A long prompt waits for its return, instead of being refused as too long meanwhile.
    assert submit(world, (1,) * 30, 5).read().ended is None


def test_an_answer_that_a_larger_owner_takes_is_no_longer_than_was_asked() -> None:
    world = world_of(20, 90)
    world.core.begin()
    world.greet()
    world.settle()
    busy = [submit(world, (seed, 2, 3), 5, rank=0) for seed in (1, 2)]
    waiting = submit(world, (1, 2, 3), 50)
    world.settle()
    assert not waiting.read().grants
    world.greet()
    world.settle()
    world.run_workers(60)
    assert all(each.read().ended == LENGTH for each in busy)
    assert [grant.dp_rank for grant in waiting.read().grants] == [1]
    assert (waiting.ended, len(waiting.ids)) == (LENGTH, 50)


def test_what_only_fitted_an_owner_that_is_gone_for_good_gets_what_is_left() -> None:
    world = world_of(20, 90, limits=NO_RESTART).bring_up()
    far = submit(world, (1, 2, 3), 30)
    world.run_workers(22)
    near = submit(world, (4, 5, 6), 30)
    world.run_workers(5)
    assert 18 < len(far.read().ids) < 30
    assert len(near.read().ids) < 18
    # Neither has a slot before the others end.
    waiting = submit(world, (7, 8, 9), 30)
    long = submit(world, (1,) * 30, 5)
    world.worker(1).die(-9)
    world.pass_time(0.1)
    assert far.read().ended == LENGTH
    world.run_workers(60)
    assert [len(each.read().ids) for each in (near, waiting)] == [18, 18]
    assert near.ended == waiting.ended == LENGTH
    ended = long.read().ended
    assert ended is not None
    assert (ended.status, ended.code) == (400, "context_length_exceeded")
    world.core.check()
