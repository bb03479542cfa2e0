"""What processes and messages have to do with each other."""

from control_world import FakeWorker, World


def one_loading() -> tuple[World, FakeWorker]:
    """A service whose first worker loads."""
    world = World()
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.settle()
    [worker] = world.alive()
    return world, worker


def test_a_worker_that_is_gone_before_its_ready_is_read_gets_no_request() -> None:
    world, worker = one_loading()
    worker.become_ready()
    worker.die(-9)
    world.core.on_arrival()
    owner = world.core.book.get(worker.index)
    assert owner is not None and not owner.takes_requests


def test_at_the_stop_a_worker_that_loads_is_killed_and_one_that_serves_told_by_message() -> None:
    world, serving = one_loading()
    serving.become_ready()
    world.core.on_arrival()
    world.greet()
    world.settle()
    loading = next(worker for worker in world.alive() if worker is not serving)
    world.core.stop()
    assert loading.signals == ["kill"]
    assert serving.signals == []
    serving.receive()
    assert world.alive() == []
