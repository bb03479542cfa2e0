import pytest

from mlx_dp.proto.messages.commands import Abort, Drain, Shutdown
from mlx_dp.worker.channel import BufferedChannel, ShutdownRequestedError
from tests.support.worker.fake_channel import FakeChannel, VirtualTime
from tests.support.worker.worker_bench import submit


def test_commands_received_in_a_step_are_handled_after_it_and_in_order() -> None:
    channel = FakeChannel(VirtualTime())
    held = BufferedChannel(channel)
    first, second, third = submit(1), Abort(request_id=1, epoch=1), Drain()
    channel.commands = [first]
    held.listen()
    channel.commands = [second]
    held.listen()
    channel.commands = [third]
    assert held.drain() == [first, second, third]
    assert held.drain() == []


def test_shutdown_does_not_wait_for_the_step() -> None:
    channel = FakeChannel(VirtualTime())
    held = BufferedChannel(channel)
    channel.commands = [submit(1), Shutdown()]
    with pytest.raises(ShutdownRequestedError):
        held.listen()


def test_waits_return_at_once_while_commands_are_buffered() -> None:
    channel = FakeChannel(VirtualTime())
    held = BufferedChannel(channel)
    channel.commands = [submit(1)]
    held.listen()
    assert held.wait(1.0)
    assert channel.waits == []
    held.drain()
    held.wait(1.0)
    assert channel.waits == [1.0]


def test_a_controller_that_never_ends_is_not_read_without_end() -> None:
    channel = FakeChannel(VirtualTime())
    held = BufferedChannel(channel)
    for _ in range(5):
        channel.commands = [submit(i) for i in range(1_000)]
        held.listen()
    assert len(held.drain()) <= 3_000
