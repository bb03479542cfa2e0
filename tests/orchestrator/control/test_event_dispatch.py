"""Conclusions from several messages that no single one allows."""

from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import Reader, World
from tests.support.control.fake_worker import generation


def test_a_worker_that_runs_less_than_it_has_accepted_is_given_up_and_its_requests_go_on() -> None:
    """The end event was lost: no later event would report the end of the request."""
    world = World().bring_up()
    reader = Reader(world.core.submit(generation(max_tokens=6)))
    world.run_workers(2)
    [holder] = [worker for worker in world.alive() if worker.running]
    holder.running.clear()
    holder.send_heartbeat()
    world.settle()
    assert world.core.counters.protocol_errors == world.core.counters.worker_deaths == 1
    world.run_workers(8)
    ended = reader.read().ended
    assert ended is not None and ended.reason is FinishReason.LENGTH
    assert len(reader.ids) == 6


def test_a_worker_may_report_more_running_requests_than_accepted_ones() -> None:
    world = World().bring_up()
    world.core.submit(generation())
    for worker in world.alive():
        worker.send_heartbeat(running=1)
    world.settle()
    assert world.core.counters.worker_deaths == 0
