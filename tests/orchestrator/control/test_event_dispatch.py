"""What messages tell of each other, beyond what each says by itself."""

from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import Reader, World
from tests.support.control.fake_worker import generation


def test_a_worker_that_runs_less_than_it_has_accepted_is_given_up_and_its_requests_go_on() -> None:
    """The report of an end was lost: nobody would ever say again that the request is over."""
    world = World().bring_up()
    reader = Reader(world.core.submit(generation(max_tokens=6)))
    world.turn(2)
    [holder] = [worker for worker in world.alive() if worker.running]
    holder.running.clear()
    holder.beat()
    world.settle()
    assert world.core.counters.protocol_errors == world.core.counters.worker_deaths == 1
    world.turn(8)
    ended = reader.read().ended
    assert ended is not None and ended.reason is FinishReason.LENGTH
    assert len(reader.ids) == 6


def test_a_worker_may_say_that_it_runs_what_it_has_not_accepted_yet() -> None:
    world = World().bring_up()
    world.core.submit(generation())
    for worker in world.alive():
        worker.beat(running=1)
    world.settle()
    assert world.core.counters.worker_deaths == 0
