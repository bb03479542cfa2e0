"""The controller's socket against raw DEALER sockets, which may send anything."""

import asyncio
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from socket import has_dualstack_ipv6

import pytest
import zmq

from mlx_dp.proto.errors import ConfigError, ProtocolError
from mlx_dp.proto.messages.commands import Drain, Shutdown, Submit
from mlx_dp.proto.messages.events import Hello
from mlx_dp.proto.messages.host_messages import Alive, Ping, host_identity
from mlx_dp.proto.wire.codec import MAX_FRAME_BYTES, encode
from mlx_dp.proto.wire.controller_channel import (
    MAX_DRAINED_MESSAGES,
    ControllerChannel,
    NotConnectedError,
    PeerCongestedError,
)
from mlx_dp.proto.wire.curve import make_keys
from mlx_dp.proto.wire.host_channel import HostChannel
from mlx_dp.proto.wire.key_files import (
    ControllerKeys,
    read_controller_keys,
    read_worker_keys,
    write_keys,
)
from mlx_dp.proto.wire.loopback import is_loopback
from mlx_dp.proto.wire.router_socket import MAX_PARTS_AT_A_TIME, Received, host_of
from mlx_dp.proto.wire.worker_channel import WorkerChannel

HELLO = Hello(pid=7)
DEADLINE_MS = 10_000


@pytest.fixture
def channel() -> Iterator[ControllerChannel]:
    made = ControllerChannel(high_water_mark=4)
    yield made
    made.close()


class Dealers:
    """Makes raw sockets, and closes them all."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []

    def __call__(self, identity: str, **options: int) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt_string(zmq.IDENTITY, identity)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(self._endpoint)
        self._sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def dealer(channel: ControllerChannel) -> Iterator[Dealers]:
    made = Dealers(channel.endpoint)
    yield made
    made.close()


async def _arrived(channel: ControllerChannel, num_messages: int) -> list:
    loop = asyncio.get_running_loop()
    arrived: list = []
    done = loop.create_future()

    def take() -> None:
        arrived.extend(channel.drain())
        if len(arrived) + channel.unknown_frames >= num_messages and not done.done():
            done.set_result(None)

    channel.attach(loop, take)
    async with asyncio.timeout(30):
        await done
    return arrived


def arrived(channel: ControllerChannel, num_messages: int) -> list:
    """Wait until this many messages came in, driven by the event loop only."""

    async def run() -> list:
        try:
            return await _arrived(channel, num_messages)
        finally:
            channel._socket.detach()

    return asyncio.run(run())


@pytest.mark.parametrize("whole", [False, True], ids=["socket", "directory"])
def test_an_endpoint_that_is_gone_is_bound_again_beside_those_connected(
    channel: ControllerChannel, dealer: Dealers, whole: bool
) -> None:
    for identity in ("w0-1", "w1-1"):
        channel.expect(identity)
    early = dealer("w0-1")
    early.send(encode(HELLO))
    assert arrived(channel, 1) == [("w0-1", HELLO)]
    path = Path(channel.endpoint.removeprefix("ipc://"))
    shutil.rmtree(path.parent) if whole else path.unlink()
    channel.keep_endpoint()
    late = dealer("w1-1")
    late.send(encode(HELLO))
    assert arrived(channel, 1) == [("w1-1", HELLO)]
    early.send(encode(HELLO))
    assert arrived(channel, 1) == [("w0-1", HELLO)]
    for identity, socket in (("w0-1", early), ("w1-1", late)):
        channel.send(identity, Drain())
        assert socket.poll(DEADLINE_MS)
    bound = path.stat().st_ino
    channel.keep_endpoint()
    assert path.stat().st_ino == bound, "it was bound again for nothing"


def test_an_endpoint_that_cannot_be_bound_again_is_one_sentence(
    channel: ControllerChannel,
) -> None:
    path = Path(channel.endpoint.removeprefix("ipc://"))
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match=f"^the socket {path} is gone and cannot be bound again: "):
        channel.keep_endpoint()


def send_until_congested(channel: ControllerChannel, message: Submit) -> int:
    for sent in range(100):
        try:
            channel.send("w0-1", message)
        except PeerCongestedError:
            return sent
    return 100


def test_a_worker_channel_is_read_and_answered(channel: ControllerChannel) -> None:
    channel.expect("w0-1")
    worker = WorkerChannel(channel.endpoint, "w0-1")
    worker.send(HELLO)
    assert arrived(channel, 1) == [("w0-1", HELLO)]
    channel.send("w0-1", Drain())
    assert worker.wait(30.0)
    assert worker.drain() == [Drain()]
    worker.close()


def test_a_lost_worker_that_sends_again_is_shut_down_and_a_stranger_is_not(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    channel.expect("w0-1")
    worker = WorkerChannel(channel.endpoint, "w0-1")
    worker.send(HELLO)
    arrived(channel, 1)
    channel.forget("w0-1")
    stranger = dealer("w9-9")
    stranger.send(encode(HELLO))
    worker.send(HELLO)
    assert arrived(channel, 2) == []
    assert worker.wait(30.0)
    assert worker.drain() == [Shutdown()]
    # Once is enough: messages do not overtake each other.
    worker.send(HELLO)
    worker.send(HELLO)
    arrived(channel, 4)
    assert not worker.wait(0.0)
    assert not stranger.poll(0)
    worker.close()


def test_the_endpoint_is_private_and_removed_at_close() -> None:
    channel = ControllerChannel()
    path = Path(channel.endpoint.removeprefix("ipc://"))
    assert path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    channel.close()
    channel.close()
    assert not path.parent.exists()


def test_a_path_that_is_too_long_is_refused_in_one_sentence(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 120)
    base.mkdir()
    with pytest.raises(ConfigError, match=f"allows {zmq.IPC_PATH_MAX_LEN}"):
        ControllerChannel(base=base)
    assert os.listdir(base) == []


@pytest.mark.parametrize(
    ("version", "refused"), [((4, 3, 4), True), ((4, 3, 5), False), ((4, 10, 0), False)]
)
def test_a_library_with_known_holes_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], refused: bool
) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: version)
    monkeypatch.setattr(zmq, "zmq_version", lambda: ".".join(map(str, version)))
    expected = pytest.raises(ConfigError, match=r"libzmq 4\.3\.4 .* at least 4\.3\.5 is needed")
    for make in (ControllerChannel, lambda: WorkerChannel("ipc:///tmp/nobody", "w0-1")):
        with expected if refused else nullcontext():
            make().close()


def test_a_directory_that_does_not_exist_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no socket directory"):
        ControllerChannel(base=tmp_path / "nowhere")


def test_two_channels_do_not_meet() -> None:
    first, second = ControllerChannel(), ControllerChannel()
    assert first.endpoint != second.endpoint
    first.close()
    second.close()


def test_loopback_tcp_is_the_alternative() -> None:
    channel = ControllerChannel(base=None)
    host, _, port = channel.endpoint.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    channel.expect("w0-1")
    worker = WorkerChannel(channel.endpoint, "w0-1")
    worker.send(HELLO)
    assert arrived(channel, 1) == [("w0-1", HELLO)]
    worker.close()
    channel.close()


def test_frames_of_unexpected_senders_are_dropped_and_counted(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    stranger = dealer("stranger")
    stranger.send(encode(HELLO))
    assert arrived(channel, 1) == []
    assert channel.unknown_frames == 1


def test_messages_of_a_forgotten_incarnation_are_dropped(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    channel.expect("w0-1")
    worker = dealer("w0-1")
    worker.send(encode(HELLO))
    assert len(arrived(channel, 1)) == 1
    channel.forget("w0-1")
    worker.send(encode(HELLO))
    assert arrived(channel, 1) == []
    assert channel.unknown_frames == 1


@pytest.mark.parametrize("frames", [[b"junk"], [b""], [encode(HELLO), b"x"], [b"", encode(HELLO)]])
def test_malformed_messages_are_protocol_errors_that_quote_nothing(
    channel: ControllerChannel, dealer: Dealers, frames: list[bytes]
) -> None:
    channel.expect("w0-1")
    worker = dealer("w0-1")
    worker.send_multipart(frames)
    worker.send(encode(HELLO))
    (identity, error), after = arrived(channel, 2)
    assert identity == "w0-1"
    assert isinstance(error, ProtocolError)
    assert "junk" not in str(error)
    assert after == ("w0-1", HELLO)


@pytest.mark.parametrize("known", [True, False])
def test_a_message_of_many_parts_is_dropped_while_the_loop_keeps_turning(
    channel: ControllerChannel, dealer: Dealers, known: bool
) -> None:
    channel.expect("w0-1")
    many = 3 * MAX_PARTS_AT_A_TIME + 1
    sender = dealer("w0-1" if known else "stranger")
    sender.send_multipart([b"part"] * many)
    sender.send(encode(HELLO))
    assert channel._socket._socket.poll(30_000)
    for _ in range(3):
        assert channel.drain() == []
        assert channel.unknown_frames == 0
    if not known:
        assert channel.drain() == []
        assert channel.unknown_frames in (1, 2)
        return
    (identity, error), *after = channel.drain()
    assert identity == "w0-1"
    assert str(error) == f"{many} frames for 1, {4 * many} bytes"
    assert (after or arrived(channel, 1)) == [("w0-1", HELLO)]


def test_the_parts_of_a_long_message_are_dropped_without_another_edge(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    dealer("stranger").send_multipart([b"part"] * (3 * MAX_PARTS_AT_A_TIME))
    assert arrived(channel, 1) == []
    assert channel.unknown_frames == 1


def test_only_the_first_part_of_a_message_is_kept() -> None:
    parts = [zmq.Frame(b"one"), zmq.Frame(b"three"), zmq.Frame(b"")]
    received = Received(b"w0-1")
    received.add_part(parts[0])
    assert received.frame is parts[0]
    received.add_part(parts[1])
    received.add_part(parts[2])
    assert (received.parts, received.nbytes, received.frame) == (3, 8, None)
    assert received.first is parts[0]


def test_a_message_that_is_too_big_is_never_read_and_cuts_the_connection(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    channel.expect("w0-1")
    worker = dealer("w0-1")
    worker.send(bytes(MAX_FRAME_BYTES + 1))

    async def run() -> list:
        # What follows it is lost too, until the sender has connected again.
        async with asyncio.timeout(30):
            while not (heard := channel.drain()):
                worker.send(encode(HELLO))
                await asyncio.sleep(0.02)
        return heard

    assert asyncio.run(run())[0] == ("w0-1", HELLO)


def test_a_send_to_a_missing_peer_is_a_lost_peer(channel: ControllerChannel) -> None:
    channel.expect("w0-1")
    with pytest.raises(NotConnectedError):
        channel.send("w0-1", Drain())


def test_a_peer_that_does_not_read_is_congested_and_nothing_is_dropped(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    channel.expect("w0-1")
    worker = dealer("w0-1", RCVHWM=1)
    worker.send(encode(HELLO))
    arrived(channel, 1)
    submit = Submit(request_id=1, epoch=1, prompt_ids=(7,) * 200_000, max_tokens=1)
    sent = send_until_congested(channel, submit)
    assert sent < 100
    for _ in range(sent):
        assert worker.poll(30_000)
        assert worker.recv() == encode(submit)


def test_more_messages_than_one_drain_takes_all_arrive_without_another_edge(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    channel.expect("w0-1")
    worker = dealer("w0-1")
    total = 3 * MAX_DRAINED_MESSAGES + 1
    for _ in range(total):
        worker.send(encode(HELLO))
    assert len(arrived(channel, total)) == total


def test_messages_that_came_in_during_a_send_are_seen(
    channel: ControllerChannel, dealer: Dealers
) -> None:
    """A send takes the edge of the descriptor, so only a look afterwards finds them."""
    channel.expect("w0-1")
    worker = dealer("w0-1")
    worker.send(encode(HELLO))
    assert len(arrived(channel, 1)) == 1

    async def run() -> list:
        loop = asyncio.get_running_loop()
        seen: list = []
        done = loop.create_future()

        def take() -> None:
            seen.extend(channel.drain())
            if seen and not done.done():
                done.set_result(None)

        channel.attach(loop, take)
        worker.send(encode(HELLO))
        # The frame is there before the loop runs; the send below swallows its edge.
        assert channel._socket._socket.poll(30_000)
        channel.send("w0-1", Drain())
        async with asyncio.timeout(30):
            await done
        return seen

    assert asyncio.run(run()) == [("w0-1", HELLO)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    write_keys(directory, ["worker"])
    return directory


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_workers_of_this_machine_and_of_others_are_read_alike(keys: Path, address: str) -> None:
    if "::" in address and not has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with closing(ControllerChannel(remote=address, keys=read_controller_keys(keys))) as channel:
        assert channel.remote_endpoint is not None
        channel.expect("w0-1")
        channel.expect("w1-1")
        near = WorkerChannel(channel.endpoint, "w0-1")
        far = WorkerChannel(channel.remote_endpoint, "w1-1", read_worker_keys(keys))
        with closing(near), closing(far):
            near.send(HELLO)
            far.send(HELLO)
            assert sorted(arrived(channel, 2), key=str) == [("w0-1", HELLO), ("w1-1", HELLO)]
            channel.send("w1-1", Drain())
            assert far.wait(30.0)
            assert far.drain() == [Drain()]


def test_a_local_endpoint_is_bound_again_open_beside_one_with_keys(keys: Path) -> None:
    made = ControllerChannel(remote="127.0.0.1:0", keys=read_controller_keys(keys))
    with closing(made) as channel:
        assert channel.remote_endpoint is not None
        Path(channel.endpoint.removeprefix("ipc://")).unlink()
        channel.keep_endpoint()
        near = WorkerChannel(channel.endpoint, "w0-1")
        far = WorkerChannel(channel.remote_endpoint, "w1-1", read_worker_keys(keys))
        with closing(near), closing(far):
            for identity, worker in (("w0-1", near), ("w1-1", far)):
                channel.expect(identity)
                worker.send(HELLO)
                assert arrived(channel, 1) == [(identity, HELLO)]


def test_hosts_are_read_apart_from_workers(keys: Path) -> None:
    heard: list = []
    with closing(
        ControllerChannel(remote="127.0.0.1:0", keys=read_controller_keys(keys))
    ) as channel:
        channel.hear_hosts(lambda identity, said: heard.append((identity, said)))
        assert channel.remote_endpoint is not None
        host = host_identity(3, 1)
        with closing(HostChannel(channel.remote_endpoint, host, read_worker_keys(keys))) as link:
            link.send(Alive())
            while not heard:
                assert channel._socket._socket.poll(DEADLINE_MS)
                assert channel.drain() == []
            assert heard == [(host, Alive())]
            channel.send_host(host, Ping())
            assert link.wait(30.0)
            assert link.drain() == [Ping()]


def test_an_endpoint_that_strangers_reach_needs_keys() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0 .*mlx-dp keys.*--keys"):
        ControllerChannel(remote="0.0.0.0:0")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:9", "127.9.9.9:1"])
def test_loopback_is_not_reached_by_strangers(address: str) -> None:
    assert is_loopback(host_of(address))


OPEN = ("0.0.0.0:0", "10.0.0.1:1", "example.com:1", "*:1", ":1", "[::]:1", "127.example.com:1")


@pytest.mark.parametrize("address", OPEN)
def test_every_other_address_is_reachable_by_strangers(address: str) -> None:
    assert not is_loopback(host_of(address))


def test_an_address_that_is_not_ours_is_refused_in_one_sentence() -> None:
    keys = ControllerKeys(own=make_keys(), allowed=frozenset())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:1 cannot be bound"):
        ControllerChannel(remote="192.0.2.1:1", keys=keys)
