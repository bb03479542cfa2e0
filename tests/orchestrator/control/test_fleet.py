"""What processes and messages have to do with each other."""

from control_world import World, generation


def test_a_worker_that_is_gone_before_its_ready_is_read_gets_no_request() -> None:
    world = World()
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.settle()
    [worker] = world.alive()
    worker.become_ready()
    worker.die(-9)
    world.core.on_arrival()
    world.core.submit(generation())
    assert not worker.inbox
    world.core.check()
