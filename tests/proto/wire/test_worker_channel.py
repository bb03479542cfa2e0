import logging
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Drain
from mlx_dp.proto.messages.events import Failed, FailureKind, Finished, FinishReason, Hello
from mlx_dp.proto.wire.codec import MAX_FRAME_BYTES, decode_up, encode
from mlx_dp.proto.wire.worker_channel import MAX_BACKLOG_FRAMES, WorkerChannel

DEADLINE_MS = 10_000


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind("tcp://127.0.0.1:*")
    yield socket
    socket.close()
    context.term()


@pytest.fixture
def channel(router: zmq.Socket[bytes]) -> Iterator[WorkerChannel]:
    with closing(WorkerChannel(router.getsockopt_string(zmq.LAST_ENDPOINT), "w3-abc")) as channel:
        yield channel


def receive(router: zmq.Socket[bytes]) -> list[bytes]:
    assert router.poll(DEADLINE_MS), "nothing arrived"
    return router.recv_multipart()


def greet(router: zmq.Socket[bytes], channel: WorkerChannel) -> None:
    channel.send(Hello(pid=1))
    receive(router)


def finished(number: int) -> Finished:
    return Finished(request_id=number, epoch=0, reason=FinishReason.STOP, num_tokens=1)


def test_messages_pass_both_ways_as_single_frames(router, channel) -> None:
    channel.send(Hello(pid=17))
    identity, frame = receive(router)
    assert identity == b"w3-abc"
    assert decode_up(frame) == Hello(pid=17)
    router.send_multipart([identity, encode(Drain())])
    assert channel.wait(30.0)
    assert channel.drain() == [Drain()]
    assert channel.drain() == []


@pytest.mark.timeout(20)
def test_a_wait_ends_for_what_is_waited_for_beside_the_controller(router, channel) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        greet(router, channel)
        assert not channel.wait(0.0, ours.fileno())
        theirs.send(b"news")
        # The controller has sent nothing, so only the second descriptor can end the wait.
        assert not channel.wait(30.0, ours.fileno())
        router.send_multipart([b"w3-abc", encode(Drain())])
        while not channel.wait(30.0, ours.fileno()):
            pass
        assert channel.drain() == [Drain()]


def test_waiting_in_vain_ends_when_the_time_is_up(channel) -> None:
    assert not channel.wait(0.0)


@pytest.mark.parametrize(
    "frames",
    [
        [b"a client's secret"],
        [encode(Drain()), b"a client's secret"],
        [encode(Hello(pid=1))],
        [b""],
    ],
    ids=["garbage", "two frames", "wrong direction", "empty"],
)
def test_a_malformed_message_is_counted_logged_without_its_bytes_and_dropped(
    frames: list[bytes], router, channel, caplog: pytest.LogCaptureFixture
) -> None:
    greet(router, channel)
    router.send_multipart([b"w3-abc", *frames])
    router.send_multipart([b"w3-abc", encode(Drain())])
    messages = []
    with caplog.at_level(logging.WARNING):
        while not messages:
            assert channel.wait(30.0)
            messages = channel.drain()
    assert messages == [Drain()]
    assert channel.malformed_frames == 1
    (record,) = caplog.records
    assert f"{sum(map(len, frames))} bytes, hash " in record.getMessage()
    assert "secret" not in record.getMessage()


def test_nothing_is_lost_or_reordered_while_the_controller_does_not_read(router, channel) -> None:
    greet(router, channel)
    # libzmq and the kernel buffer the first of them.
    message = Failed(kind=FailureKind.INTERNAL, message="x" * 2_000)
    for _ in range(20_000):
        channel.send(message)
    for number in range(100):
        channel.send(finished(number))
    assert channel.congested
    received = []
    while len(received) < 20_100:
        channel.wait(0.0)
        received.append(decode_up(receive(router)[1]))
    assert received[:20_000] == [message] * 20_000
    assert received[20_000:] == [finished(number) for number in range(100)]
    assert not channel.congested


def flood(channel: WorkerChannel, num_messages: int) -> None:
    for number in range(num_messages):
        channel.send(finished(number))


def test_a_backlog_without_end_is_an_error_and_not_memory() -> None:
    with closing(WorkerChannel("tcp://127.0.0.1:1", "w0")) as channel:
        with pytest.raises(ProtocolError, match=f"{MAX_BACKLOG_FRAMES} frames wait"):
            flood(channel, 10 * MAX_BACKLOG_FRAMES)
        assert channel.congested


def test_the_last_words_leave_before_a_lingering_close(router) -> None:
    channel = WorkerChannel(router.getsockopt_string(zmq.LAST_ENDPOINT), "w0")
    channel.send(Failed(kind=FailureKind.CONFIG, message="no such model"))
    channel.close(linger_s=10.0)
    assert decode_up(receive(router)[1]).tag == "failed"


def test_a_close_without_a_controller_does_not_wait() -> None:
    channel = WorkerChannel("tcp://127.0.0.1:1", "w0")
    channel.send(Hello(pid=1))
    channel.close()


def test_a_frame_beyond_the_limit_never_arrives(router, channel) -> None:
    greet(router, channel)
    router.send_multipart([b"w3-abc", b"x" * (MAX_FRAME_BYTES + 1)])
    # The socket is cut off and comes back by itself; the frame is gone for good.
    assert not channel.wait(0.5)
    assert channel.drain() == []
