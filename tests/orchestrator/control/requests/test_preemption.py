"""An owner that is short of memory preempts requests; they resume later, unseen by clients."""

from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import Generation
from mlx_dp.orchestrator.control.state.owner import Owner
from mlx_dp.proto.capacity.request_limits import NEXT_ANSWER_TOKENS, reserved_tokens
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import expected, generation, ready


def submit(world: World, *args, **kwargs) -> Reader:
    return Reader(world.core.submit(generation(*args, **kwargs)))


def world_of(*readies) -> World:
    world = World(serve_options(len(readies)))
    world.readies = dict(enumerate(readies))
    return world.bring_up()


def owner_of(world: World, index: int = 0) -> Owner:
    owner = world.core.ranks.get(index)
    assert owner is not None
    return owner


def test_a_preempted_request_goes_on_without_a_seam_and_starts_once() -> None:
    world = world_of(ready(), ready())
    reader = submit(world, max_tokens=9)
    world.run_workers(3)
    world.worker(0).preempt(1)
    world.run_workers(7)
    assert reader.read().ids == expected(generation(), 9)
    assert reader.ended is not None
    assert reader.ended.reason is FinishReason.LENGTH
    assert [grant.dp_rank for grant in reader.grants] == [0, 1]
    assert len(reader.starts) == 1
    counters = world.core.counters
    assert counters.preempted_by_owner == {0: 1}
    assert counters.requests_replayed == counters.protocol_errors == 0
    assert counters.prompt_by_owner == {0: 3}
    assert [owner.preemptions_total for owner in world.core.views.owners()] == [1, 0]


def test_preemptions_are_neither_attempts_nor_suspicion() -> None:
    world = world_of(ready())
    reader = submit(world, max_tokens=50)
    for _ in range(20):
        world.run_workers()
        world.worker(0).preempt(1)
        world.settle()
        world.pass_time(0.6)
    for _ in range(2):
        world.run_workers()
        world.worker(0).kill()
        world.recover()
    world.run_workers(60)
    assert reader.read().ids == expected(generation(), 50)


@pytest.mark.parametrize("prefilled", [True, False])
def test_a_cancelled_request_just_frees_its_slot(prefilled: bool) -> None:
    world = world_of(ready())
    reader = submit(world, max_tokens=9)
    worker = world.worker(0)
    worker.receive()
    if prefilled:
        worker.run_once()
    worker.preempt(1)
    world.core.lifecycle.cancel(1, world.clock.now)
    world.run_workers()
    assert reader.read().ended is not None
    assert not owner_of(world).grants
    assert world.core.counters.protocol_errors == 0


def test_an_answer_that_was_complete_ends_instead_of_going_on() -> None:
    world = world_of(ready())
    stop = expected(generation(), 2)[-1]
    reader = submit(world, max_tokens=9, stop=(stop,))
    worker = world.worker(0)
    worker.receive()
    # It does not know yet that its last token ends the answer.
    worker.running[1].submit = replace(worker.running[1].submit, stop_token_ids=())
    worker.run_once()
    worker.run_once()
    worker.preempt(1)
    world.run_workers()
    assert reader.read().ended is not None
    assert reader.ended.reason is FinishReason.STOP
    assert not owner_of(world).grants


def test_it_does_not_bounce_at_once_to_the_owner_that_gave_it_up() -> None:
    world = world_of(ready(slots=9), ready(slots=1))
    submit(world, (9,), 900, rank=1)
    young = submit(world, max_tokens=50, rank=0)
    world.run_workers(2)
    world.worker(0).preempt(2)
    world.settle()
    assert len(young.read().grants) == 1
    # No other request gets the memory that it gave back either.
    other = submit(world, max_tokens=50)
    world.run_workers(2)
    assert not other.read().grants
    world.pass_time(0.6)
    assert [grant.dp_rank for grant in young.read().grants] == [0, 0]
    assert other.read().grants


def test_it_is_offered_once_a_heartbeat_and_rejected_without_prefill() -> None:
    world = world_of(ready(slots=9, pool=None, memory_tokens=60))
    old = submit(world, (1,) * 10, 45)
    young = submit(world, (2,) * 10, 15)
    world.run_workers(12)
    world.worker(0).preempt(2)
    world.settle()
    prefilled = world.core.counters.prompt_by_owner.total()
    world.run_workers(10)
    world.pass_time(2.0)
    world.run_workers(10)
    assert len(young.read().grants) <= 5
    assert world.core.counters.prompt_by_owner.total() == prefilled
    world.run_workers(30)
    world.pass_time(0.6)
    world.run_workers(20)
    assert old.read().ended is not None
    assert young.read().ids == expected(generation((2,) * 10), 15)


def test_an_owner_that_refuses_in_a_row_is_asked_less_and_less_often() -> None:
    world = world_of(ready(slots=9, pool=None, memory_tokens=38))
    submit(world, (1,) * 10, 25)
    young = submit(world, (2,) * 10, 15)
    world.run_workers(9)
    world.worker(0).preempt(2)
    world.settle()
    asked: list[int] = []
    for heartbeat in range(1, 60):
        grants = len(young.read().grants)
        world.worker(0).step += 1
        world.pass_time(0.5)
        world.settle()
        if len(young.read().grants) > grants:
            asked.append(heartbeat)
    assert asked == [1, 3, 7, 15, 31, 47]
    world.worker(0).finish(1, FinishReason.LENGTH)
    world.core.on_arrival()
    world.run_workers()
    assert len(young.read().grants) == 8
    assert owner_of(world).shortages == 0


def test_the_end_of_another_request_is_enough_without_a_heartbeat() -> None:
    world = world_of(ready(slots=9, memory_tokens=40))
    submit(world, (1,) * 10, 12)
    young = submit(world, (2,) * 10, 25)
    world.run_workers(12)
    assert len(young.read().grants) == 2


def test_the_oldest_goes_first_in_any_order_of_preemption() -> None:
    world = world_of(ready(slots=2), ready(slots=2))
    readers = [submit(world, (n,), 50) for n in range(4)]
    waiting = submit(world, (9,), 50)
    world.run_workers(2)
    # Requests 2 and 4 run at owner 1, requests 1 and 3 at owner 0.
    for index, request_id in ((0, 1), (1, 4), (1, 2), (0, 3)):
        world.worker(index).preempt(request_id)
        world.core.on_arrival()
    order = []
    queue = world.core.table.queue
    while len(queue):
        order.append(queue.heads()[0].request_id)
        world.core.lifecycle.cancel(order[-1], world.clock.now)
    assert order == [1, 2, 3, 4, 5]
    assert all(len(reader.read().grants) == 1 for reader in readers)
    assert not waiting.read().grants


def drive(world: World, readers: list[tuple[Generation, Reader]], turns: int) -> int:
    """Run loops until all have ended, with a heartbeat every ten runs; return the runs."""
    for turn in range(turns):
        world.run_workers()
        if turn % 10 == 0:
            world.pass_time(0.5)
        if all(reader.read().ended for _, reader in readers):
            return turn
    raise AssertionError("they never end")


@pytest.mark.parametrize("owners", [1, 3])
@pytest.mark.parametrize("pool", [None, 1500, 3000])
def test_owners_that_answers_outgrow_still_finish_everything(owners: int, pool: int | None) -> None:
    # Rows may well take twice the memory of their tokens.
    world = world_of(*[ready(slots=8, pool=pool, memory_tokens=1500)] * owners)
    readers = []
    for n in range(12):
        wanted = generation((n,) * (5 + n), 700, seed=n)
        readers.append((wanted, Reader(world.core.submit(wanted))))
    turns = drive(world, readers, 9000)
    for wanted, reader in readers:
        assert reader.ids == expected(wanted, 700)
    assert world.core.counters.requests_error == 0
    # Work is lost by preemptions, and yet this is far from one request at a time.
    assert turns < 0.5 * 12 * 700 / owners
    assert 0 < world.core.counters.preempted_by_owner.total() < 12 * 3


def test_an_old_request_is_not_starved_by_a_stream_of_small_ones() -> None:
    world = world_of(ready(slots=8, pool=400, memory_tokens=200))
    large = (generation((7,) * 100, 90, seed=1), submit(world, (7,) * 100, 90, seed=1))
    readers = [large]
    for n in range(400):
        if len(world.core.table.queue) < 5:
            wanted = generation((n % 90,) * 20, 30, seed=n)
            readers.append((wanted, Reader(world.core.submit(wanted))))
        world.run_workers()
        if n % 2 == 0:
            world.pass_time(0.1)
    assert large[1].read().ended is not None
    assert large[1].ids == expected(large[0], 90)


def test_a_grant_sets_aside_what_comes_next_and_grows_with_the_answer() -> None:
    world = world_of(ready(slots=9, pool=1000))
    reader = submit(world, (1,) * 10, 700)
    owner = owner_of(world)
    assert owner.reserved_tokens == 10 + NEXT_ANSWER_TOKENS - 1
    world.run_workers(100)
    assert owner.reserved_tokens == 110 + NEXT_ANSWER_TOKENS - 1
    world.run_workers(590)
    assert owner.reserved_tokens == reserved_tokens(10, 700)
    world.run_workers(10)
    assert reader.read().ended is not None
    assert owner.reserved_tokens == 0


def test_where_answers_have_outgrown_the_pool_nothing_is_granted() -> None:
    world = world_of(ready(slots=9, pool=1000))
    for _ in range(3):
        submit(world, (1,), 900)
    waiting = submit(world, (1,), 300)
    assert not waiting.read().grants
    owner = owner_of(world)
    world.run_workers(400)
    assert owner.free_tokens is not None
    assert owner.free_tokens < 0
    world.core.lifecycle.cancel(1, world.clock.now)
    world.run_workers(2)
    assert owner.free_tokens < 0
    assert not waiting.read().grants
    world.core.lifecycle.cancel(2, world.clock.now)
    world.run_workers(2)
    assert waiting.read().grants
