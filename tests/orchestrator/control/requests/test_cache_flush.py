"""A flush reaches every ready owner, and one result comes back from each."""

from mlx_dp.orchestrator.api import FlushOutcome, OwnerFlush
from mlx_dp.proto.messages.events import Flushed
from tests.support.control.control_world import World, serve_options
from tests.support.control.fake_worker import generation


def answered(owner: int, num_tokens: int = 0) -> OwnerFlush:
    return OwnerFlush(
        dp_rank=owner,
        outcome=FlushOutcome.FLUSHED,
        num_tokens=num_tokens,
        nbytes=2 * num_tokens,
    )


def outcomes(results: tuple[OwnerFlush, ...]) -> list[str]:
    return [result.outcome.value for result in results]


def test_each_owner_tells_what_it_has_freed() -> None:
    world = World(serve_options(2)).bring_up()
    for prompt in ((1,) * 10, (2,) * 20):
        world.core.submit(generation(prompt, 1))
    world.run_workers(2)
    flush = world.core.begin_flush()
    assert not world.core.flushes.done(flush)
    world.settle()
    assert world.core.flushes.done(flush)
    assert world.core.flushes.end(flush) == (answered(0, 10), answered(1, 20))


def test_running_requests_go_on() -> None:
    world = World(serve_options(1)).bring_up()
    answer = world.core.submit(generation(max_tokens=5))
    world.run_workers(2)
    world.core.begin_flush()
    world.run_workers(4)
    assert world.core.lifecycle.idle
    answer.cancel()
    assert world.core.counters.requests_ok == 1


def test_an_owner_that_does_not_answer_is_late() -> None:
    world = World(serve_options(2)).bring_up()
    world.worker(1).stopped = True
    flush = world.core.begin_flush()
    world.settle()
    assert not world.core.flushes.done(flush)
    assert outcomes(world.core.flushes.end(flush)) == ["flushed", "timeout"]
    world.worker(1).stopped = False
    world.settle()
    assert world.core.counters.stale_events == 1
    assert world.core.counters.protocol_errors == 0


def test_the_flush_does_not_wait_for_a_lost_owner() -> None:
    world = World(serve_options(2)).bring_up()
    flush = world.core.begin_flush()
    world.worker(1).die(-9)
    world.pass_time(0.1)
    world.settle()
    assert world.core.flushes.done(flush)
    assert outcomes(world.core.flushes.end(flush)) == ["flushed", "lost"]


def test_an_owner_that_cannot_be_reached_is_lost() -> None:
    world = World(serve_options(2)).bring_up()
    world.cut.add(world.worker(0).identity)
    flush = world.core.begin_flush()
    world.settle()
    assert outcomes(world.core.flushes.end(flush)) == ["lost", "flushed"]


def test_an_owner_whose_channel_is_full_is_told_as_soon_as_it_is_not() -> None:
    world = World(serve_options(2)).bring_up()
    world.congested = {world.worker(0).identity}
    flush = world.core.begin_flush()
    world.settle()
    assert not world.core.flushes.done(flush)
    world.congested = set()
    world.pass_time(0.1)
    world.settle()
    assert outcomes(world.core.flushes.end(flush)) == ["flushed", "flushed"]


def test_an_owner_that_starts_has_nothing_to_flush() -> None:
    world = World(serve_options(2))
    world.core.begin()
    world.greet()
    world.settle()
    flush = world.core.begin_flush()
    world.settle()
    assert world.core.flushes.done(flush)
    assert outcomes(world.core.flushes.end(flush)) == ["flushed", "not_ready"]


def test_two_flushes_have_their_own_answers() -> None:
    world = World(serve_options(1)).bring_up()
    first, second = world.core.begin_flush(), world.core.begin_flush()
    world.worker(0).commands.clear()
    world.worker(0).send_event(Flushed(flush_id=second, num_tokens=7, nbytes=14))
    world.core.on_arrival()
    assert not world.core.flushes.done(first)
    assert world.core.flushes.end(second) == (answered(0, 7),)
    assert outcomes(world.core.flushes.end(first)) == ["timeout"]


def test_an_answer_to_a_finished_flush_is_stale() -> None:
    world = World(serve_options(1)).bring_up()
    flush = world.core.begin_flush()
    world.settle()
    for flush_id in (flush, flush + 1):
        world.worker(0).send_event(Flushed(flush_id=flush_id, num_tokens=7, nbytes=14))
    world.core.on_arrival()
    assert world.core.counters.stale_events == 2
    assert world.core.flushes.end(flush) == (answered(0),)
