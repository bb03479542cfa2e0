"""One client's connection: uvicorn's, with the deadlines and bounds that it lacks.

uvicorn waits for ever for a head, for a body that nobody reads, and for a client that takes
nothing of its answer.
"""

import asyncio
import http
import sys
from typing import Any, Final, assert_never, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlx_dp.orchestrator.http.client_clock import ClientClock, ClientPhase, ClientTimeouts, Overdue
from mlx_dp.orchestrator.http.client_socket import set_up_client_socket
from mlx_dp.orchestrator.http.clients import Clients
from mlx_dp.orchestrator.http.counted_transport import CountedTransport
from mlx_dp.orchestrator.openai.errors import ApiError, overloaded
from mlx_dp.orchestrator.service import RETRY_ABSENT_S

MAX_EARLY_NBYTES: Final = 64 * 2**10
"""The most that a client may send before it has its answer."""

_WAITING: Final = (ClientPhase.IDLE, ClientPhase.HEAD)


class GuardedState(ServerState):
    """What the connections of one server share."""

    def __init__(self, clients: Clients, timeouts: ClientTimeouts) -> None:
        super().__init__()
        self.clients = clients
        self.timeouts = timeouts


class GuardedProtocol(H11Protocol):
    """Tells its clock what it sees; the server has all of them checked every second."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(server_state, GuardedState), server_state
        self._clients = server_state.clients
        self._timeouts = server_state.timeouts
        self._clock = ClientClock(self.loop.time())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted = CountedTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._counted))
        client = transport.get_extra_info("socket")
        try:
            set_up_client_socket(client, send_timeout_s=self._timeouts.send_s)
        except OSError:
            # It has left already, and macOS then refuses all options.
            transport.abort()
            return
        if not self._clients.admit(self):
            self._refuse(
                overloaded(503, "too many connections are open", retry_after_s=RETRY_ABSENT_S)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.leave(self)
        super().connection_lost(exc)
        # After an error of the socket, uvicorn lets its timer run on.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_phase()
        if self._clock.phase is ClientPhase.ANSWER:
            self._read_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_phase()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with the request itself, in the shape of all other errors."""
        # uvicorn calls this while it handles the parser's error, and passes on only its own words.
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(ApiError(status, "this is no valid HTTP/1.1 request", code="invalid_http"))

    def check(self, now: float) -> None:
        self._clock.unsent(
            self.transport.get_write_buffer_size(),
            written_nbytes=self._counted.written_nbytes,
            now=now,
        )
        match self._clock.overdue(self._timeouts, now):
            case None:
                return
            case Overdue.IDLE:
                self.give_way()
            case Overdue.HEAD:
                self._refuse(ApiError(408, f"no request within {self._timeouts.head_s:g} s"))
            case Overdue.BODY | Overdue.SENT:
                # Whoever waits for the body has told the client before.
                self.transport.abort()
            case unknown:
                assert_never(unknown)

    def give_way(self) -> None:
        self.transport.close()

    def _read_on(self) -> None:
        """Have reads go on in the middle of an answer, or nobody sees that the client leaves.

        uvicorn pauses them when a client sends its next request early.
        """
        early, _ = self.conn.trailing_data
        if len(early) > MAX_EARLY_NBYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _note_phase(self) -> None:
        phase = self._phase()
        self._clock.enter(phase, self.loop.time())
        self._clients.waits(self, phase in _WAITING)

    def _phase(self) -> ClientPhase:
        if self.conn.their_state is h11.SEND_BODY:
            return ClientPhase.BODY
        if self.conn.their_state is not h11.IDLE:
            return ClientPhase.ANSWER
        begun, _ = self.conn.trailing_data
        return ClientPhase.HEAD if begun or self.cycle is None else ClientPhase.IDLE

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, in bytes of our own: after an error the parser may refuse to."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                # In the middle of another answer there is no place for this one.
                self.transport.abort()
                return
            # Whoever waits for the body is not to answer after us.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_closing_response(error))
        self.transport.close()


def _closing_response(error: ApiError) -> bytes:
    body = error.body()
    phrase = http.HTTPStatus(error.status).phrase
    lines = [
        f"HTTP/1.1 {error.status} {phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in error.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
