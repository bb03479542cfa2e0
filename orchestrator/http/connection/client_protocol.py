"""One client's connection: uvicorn's, with the deadlines and bounds that it lacks.

uvicorn waits forever for a head, for a body that no route reads, and for a client that does not
read its response.
"""

import asyncio
import http
import socket
import sys
from typing import Any, Final, assert_never, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlx_dp.orchestrator.api import RETRY_ABSENT_S
from mlx_dp.orchestrator.formats.common.api_format import ApiFormat
from mlx_dp.orchestrator.formats.common.errors import ApiError, overloaded
from mlx_dp.orchestrator.http.connection.client_clock import (
    ClientClock,
    ClientPhase,
    ClientTimeouts,
    Overdue,
)
from mlx_dp.orchestrator.http.connection.connection_table import ConnectionTable

MAX_HEAD_NBYTES: Final = 64 * 2**10
"""The parser bounds an incomplete head. A complete one may be larger, and is checked later."""
MAX_EARLY_NBYTES: Final = 64 * 2**10
"""The most that a client may send of its next request before it has its response."""

# The kernel would grow this to megabytes for each client that does not read.
SEND_BUFFER_NBYTES: Final = 128 * 2**10

_FIRST_PROBE_S: Final = 15
_NEXT_PROBE_S: Final = 5
_PROBES: Final = 3
# Linux and macOS name this option differently.
_SECONDS_OF_SILENCE: Final = ("TCP_KEEPIDLE", "TCP_KEEPALIVE")
_WAITING: Final = (ClientPhase.IDLE, ClientPhase.HEAD)


class SharedState(ServerState):
    """State that the connections of one server share.

    ``api_format`` writes errors about requests that have no route yet.
    """

    def __init__(
        self, connections: ConnectionTable, timeouts: ClientTimeouts, api_format: ApiFormat
    ) -> None:
        super().__init__()
        self.api_format = api_format
        self.connection_table = connections
        self.timeouts = timeouts


class ClientProtocol(H11Protocol):
    """Feeds its clock with events. The server checks all deadlines every second."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(server_state, SharedState), server_state
        self._connection_table = server_state.connection_table
        self._timeouts = server_state.timeouts
        self._api_format = server_state.api_format
        self._clock = ClientClock(self.loop.time())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted = CountedTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._counted))
        client = transport.get_extra_info("socket")
        try:
            set_up_client_socket(client, send_timeout_s=self._timeouts.send_s)
        except OSError:
            # The client has disconnected already: macOS then refuses all options.
            transport.abort()
            return
        if not self._connection_table.try_add(self):
            self._refuse(
                overloaded(503, "too many connections are open", retry_after_s=RETRY_ABSENT_S)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection_table.remove(self)
        super().connection_lost(exc)
        # After an error of the socket, uvicorn lets its timer run on.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_phase()
        if self._clock.phase is ClientPhase.ANSWER:
            self._keep_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_phase()

    def send_400_response(self, msg: str) -> None:
        """Report a parser error in the shape of all other errors."""
        # uvicorn calls this while it handles the parser's error, but does not pass it on.
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(ApiError(status, "invalid HTTP/1.1 request", code="invalid_http"))

    def check_deadlines(self, now: float) -> None:
        self._clock.unsent(
            self.transport.get_write_buffer_size(),
            written_nbytes=self._counted.written_nbytes,
            now=now,
        )
        match self._clock.overdue(self._timeouts, now):
            case None:
                return
            case Overdue.IDLE:
                self.close_idle()
            case Overdue.HEAD:
                self._refuse(ApiError(408, f"no request within {self._timeouts.head_s:g} s"))
            case Overdue.BODY | Overdue.SENT:
                # The route that reads the body has sent a 408 before.
                self.transport.abort()
            case unknown:
                assert_never(unknown)

    def close_idle(self) -> None:
        self.transport.close()

    def _keep_reading(self) -> None:
        """Keep reading during a response, so that a disconnect is noticed.

        uvicorn pauses reading when a client sends its next request early.
        """
        early, _ = self.conn.trailing_data
        if len(early) > MAX_EARLY_NBYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _note_phase(self) -> None:
        phase = self._phase()
        self._clock.enter(phase, self.loop.time())
        self._connection_table.set_waiting(self, phase in _WAITING)

    def _phase(self) -> ClientPhase:
        if self.conn.their_state is h11.SEND_BODY:
            return ClientPhase.BODY
        if self.conn.their_state is not h11.IDLE:
            return ClientPhase.ANSWER
        begun, _ = self.conn.trailing_data
        return ClientPhase.HEAD if begun or self.cycle is None else ClientPhase.IDLE

    def _refuse(self, error: ApiError) -> None:
        """Respond and close, without the parser: after an error it may refuse to write."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                # In the middle of another response there is no place for this one.
                self.transport.abort()
                return
            # The route that reads the body must not respond, too.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_closing_response(error, self._api_format))
        self.transport.close()


def _closing_response(error: ApiError, api_format: ApiFormat) -> bytes:
    written = api_format.error_response(error)
    phrase = http.HTTPStatus(written.status).phrase
    lines = [
        f"HTTP/1.1 {written.status} {phrase}",
        "content-type: application/json",
        f"content-length: {len(written.body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in error.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + written.body


class CountedTransport:
    """asyncio tells only the size of its buffer, which hides how much the client has read."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written_nbytes = 0

    def write(self, data: bytes) -> None:
        self.written_nbytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def set_up_client_socket(client: socket.socket, *, send_timeout_s: float) -> None:
    """Bound the send buffer, and let the system end a connection whose peer is gone.

    A client that loses power sends no FIN, and would keep its request's slot. Keep-alive probes
    notice it while nothing is sent, and missing acknowledgements while something is.
    """
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in _SECONDS_OF_SILENCE:
        _set(client, name, _FIRST_PROBE_S)
    _set(client, "TCP_KEEPINTVL", _NEXT_PROBE_S)
    _set(client, "TCP_KEEPCNT", _PROBES)
    _set(client, "TCP_USER_TIMEOUT", round(1000 * send_timeout_s))


def _set(client: socket.socket, name: str, value: int) -> None:
    option: int | None = getattr(socket, name, None)
    if option is not None:
        client.setsockopt(socket.IPPROTO_TCP, option, value)
