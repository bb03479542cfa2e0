"""The connection state that a host sees when it cannot reach a controller: real sockets."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mlx_dp.proto.messages.host_messages import Alive
from mlx_dp.proto.wire.connection_state import ConnectionState as State
from mlx_dp.proto.wire.curve import make_keys
from mlx_dp.proto.wire.host_channel import HostChannel
from mlx_dp.proto.wire.key_files import ControllerKeys, WorkerKeys
from mlx_dp.proto.wire.router_socket import RouterSocket

CONTROLLER, WORKER, STRANGER = make_keys(), make_keys(), make_keys()
GOOD = WorkerKeys(own=WORKER, controller=CONTROLLER.public)
DEADLINE_S = 30.0


@pytest.fixture
def closed() -> Iterator[str]:
    keys = ControllerKeys(own=CONTROLLER, allowed=frozenset([WORKER.public]))
    router = RouterSocket(high_water_mark=8, keys=keys)
    yield router.bind_tcp("127.0.0.1:0")
    router.close()


@pytest.fixture
def open_to_all() -> Iterator[str]:
    router = RouterSocket(high_water_mark=8)
    yield router.bind_tcp("127.0.0.1:0")
    router.close()


def state_of(endpoint: str, keys: WorkerKeys | None, *wanted: State) -> State:
    """The state once it is an expected one, or else at the deadline."""
    channel = HostChannel(endpoint, "host-1-a", keys)
    channel.send(Alive())
    ends_at = time.monotonic() + DEADLINE_S
    try:
        while channel.connection not in wanted and time.monotonic() < ends_at:
            channel.wait(0.02)
        return channel.connection
    finally:
        channel.close()


def test_the_right_keys_are_let_in(closed: str, open_to_all: str) -> None:
    assert state_of(closed, GOOD, State.READY) is State.READY
    assert state_of(open_to_all, None, State.READY) is State.READY


@pytest.mark.parametrize(
    ("keys", "state"),
    [
        (WorkerKeys(own=STRANGER, controller=CONTROLLER.public), State.KEY_REFUSED),
        (WorkerKeys(own=WORKER, controller=STRANGER.public), State.BROKEN_OFF),
    ],
    ids=["a worker's key that is not known", "another controller's key"],
)
def test_wrong_keys_are_told_from_none(closed: str, keys, state) -> None:
    assert state_of(closed, keys, state) is state


def test_a_controller_that_wants_keys(closed: str) -> None:
    told = (State.BROKEN_OFF, State.OTHER_MECHANISM)
    assert state_of(closed, None, *told) in told


def test_keys_that_the_controller_has_no_use_for(open_to_all: str) -> None:
    assert state_of(open_to_all, GOOD, State.OTHER_MECHANISM) is State.OTHER_MECHANISM


def test_a_port_without_a_listener() -> None:
    with socket.socket() as taken:
        # Bound, so that no other process gets it meanwhile, and not listened on.
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        channel = HostChannel(endpoint, "host-1-a", GOOD)
        channel.wait(0.3)
        assert channel.connection is State.UNREACHED
        channel.close()


def test_another_kind_of_server() -> None:
    def answer(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(64)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=answer, args=(listener,), daemon=True)
        serving.start()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert state_of(endpoint, None, State.BROKEN_OFF) is State.BROKEN_OFF
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()
