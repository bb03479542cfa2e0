from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import zmq

from mlx_dp.proto.messages.curve_keys import KEY_CHARS, CurveKeys
from mlx_dp.proto.wire.curve import KeyGuard, join_curve, make_keys, serve_curve, serve_openly

DEADLINE_MS = 10_000
SERVER = make_keys()
CLIENT = make_keys()
STRANGER = make_keys()


class Clients:
    """Sockets in a context of their own, all closed in the end."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def keep(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        self._sockets.append(socket)
        return socket

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        return self.keep(self._context.socket(kind))

    def close(self) -> None:
        for socket in reversed(self._sockets):
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def context() -> Iterator[Clients]:
    with closing(Clients()) as clients:
        yield clients


@pytest.fixture
def server() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    guard = KeyGuard(context, frozenset({CLIENT.public}))
    socket = context.socket(zmq.ROUTER)
    serve_curve(socket, SERVER)
    socket.bind("tcp://127.0.0.1:0")
    yield socket
    socket.close(linger=0)
    context.term()
    guard.close()


def connect(context, endpoint: str, keys: CurveKeys | None, server_public: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    if keys is not None:
        join_curve(socket, keys, server_public)
    socket.connect(endpoint)
    return socket


def refusal(context, endpoint: str, keys: CurveKeys | None, server_public: str) -> int:
    """The result of a handshake, after which nothing of it can arrive any more."""
    socket = context.socket(zmq.DEALER)
    if keys is not None:
        join_curve(socket, keys, server_public)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
    events = failed | zmq.EVENT_HANDSHAKE_SUCCEEDED
    monitor = context.keep(socket.get_monitor_socket(events))
    socket.connect(endpoint)
    # A rejected client already has no peer to send to.
    with suppress(zmq.Again):
        socket.send(b"let me in", zmq.NOBLOCK)
    assert monitor.poll(DEADLINE_MS), "the handshake neither failed nor succeeded"
    return int.from_bytes(monitor.recv_multipart()[0][:2], "little")


def test_a_known_key_is_let_in(server, context) -> None:
    client = connect(context, server.getsockopt_string(zmq.LAST_ENDPOINT), CLIENT, SERVER.public)
    client.send(b"hello")
    assert server.poll(DEADLINE_MS)
    identity, frame = server.recv_multipart()
    assert frame == b"hello"
    server.send_multipart([identity, b"welcome"])
    assert client.poll(DEADLINE_MS)
    assert client.recv() == b"welcome"


@pytest.mark.parametrize(
    ("keys", "server_public"),
    [
        pytest.param(STRANGER, SERVER.public, id="an unknown key"),
        pytest.param(CLIENT, STRANGER.public, id="the key of another server"),
        pytest.param(None, "", id="no key"),
    ],
)
def test_every_other_client_is_rejected(server, context, keys, server_public) -> None:
    endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
    assert refusal(context, endpoint, keys, server_public) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not server.poll(0)


def test_without_a_guard_no_client_is_let_in(context) -> None:
    with closing(context.socket(zmq.ROUTER)) as unguarded:
        unguarded.setsockopt(zmq.LINGER, 0)
        serve_curve(unguarded, SERVER)
        unguarded.bind("tcp://127.0.0.1:0")
        endpoint = unguarded.getsockopt_string(zmq.LAST_ENDPOINT)
        assert refusal(context, endpoint, CLIENT, SERVER.public) != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert not unguarded.poll(0)


def test_one_socket_may_have_an_open_and_a_closed_endpoint(context, short_path) -> None:
    with closing(context.socket(zmq.ROUTER)) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{short_path}/open")
        local = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        serve_curve(socket, SERVER)
        socket.bind("tcp://127.0.0.1:0")
        connect(context, local, None, "").send(b"from here")
        assert socket.poll(DEADLINE_MS)
        assert socket.recv_multipart()[1] == b"from here"


def test_an_endpoint_may_be_opened_after_a_closed_one_which_stays_closed(
    server, context, short_path
) -> None:
    closed = server.getsockopt_string(zmq.LAST_ENDPOINT)
    serve_openly(server, guarded=True)
    server.bind(f"ipc://{short_path}/open")
    connect(context, server.getsockopt_string(zmq.LAST_ENDPOINT), None, "").send(b"from here")
    assert server.poll(DEADLINE_MS)
    assert server.recv_multipart()[1] == b"from here"
    for keys in (STRANGER, None):
        assert refusal(context, closed, keys, SERVER.public) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert refusal(context, closed, CLIENT, SERVER.public) == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_keys_are_text_and_the_secret_is_not_shown() -> None:
    keys = make_keys()
    assert len(keys.public) == len(keys.secret) == KEY_CHARS
    assert keys.secret not in repr(keys)
    assert keys.public in repr(keys)
    assert make_keys() != keys
