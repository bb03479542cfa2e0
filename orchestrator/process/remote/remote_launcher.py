"""Launches workers on other machines, through the hosts that joined from there."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from mlx_dp.orchestrator.ports import Launcher, WorkerProcess
from mlx_dp.orchestrator.process.remote.host_table import (
    HostAction,
    HostTable,
    HostTimes,
    SendToHost,
    WorkerEnded,
)
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.host_messages import HostDown, HostUp, Launch, SignalWorker
from mlx_dp.proto.wire.controller_channel import TakeHost
from mlx_dp.proto.wire.router_socket import NotConnectedError, PeerCongestedError

_logger = logging.getLogger(__name__)


class HostWire(Protocol):
    """The part of the controller's channel that talks to hosts."""

    def hear_hosts(self, take: TakeHost) -> None: ...

    def send_host(self, identity: str, message: HostDown) -> None:
        """Send a message. Raises NotConnectedError or PeerCongestedError if it was not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """The controller's model, of which every host needs a copy, and the log level."""

    path: str
    fingerprint: str
    log_level: str


class RemoteLauncher:
    """Launches each remote rank on the host that joined for it, and local ranks by ``local``."""

    def __init__(
        self,
        local: Launcher,
        wire: HostWire,
        ranks: frozenset[int],
        model: RemoteModel,
        times: HostTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local: Final = local
        self._ranks: Final = ranks
        self._wire: Final = wire
        self._model: Final = model
        self._times: Final = times
        self._clock: Final = clock
        self._hosts: Final = HostTable(ranks, times)
        self._exits: Final[dict[str, Callable[[int], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._expected_at = 0.0
        wire.hear_hosts(self._handle)

    def host_of(self, index: int) -> str | None:
        """Return the machine of a worker: "" is this one, None a remote rank without a host."""
        if not self._hosts.is_remote(index):
            return ""
        record = self._hosts.record(index)
        return record.host if record.link else None

    def present(self) -> frozenset[int]:
        """The ranks that have a host now."""
        return frozenset(rank for rank in self._ranks if self._hosts.record(rank).link)

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """Start a worker; see ``Launcher``."""
        if not self._hosts.is_remote(index):
            return self._local.spawn(index, identity, endpoint, on_exit)
        record = self._hosts.record(index)
        if not record.link:
            raise OSError(f"no host has joined for rank {index}: start mlx-dp worker there")
        launch = Launch(
            identity=identity,
            model_path=self._model.path,
            model_fingerprint=self._model.fingerprint,
            log_level=self._model.log_level,
        )
        try:
            self._wire.send_host(record.link, launch)
        except (NotConnectedError, PeerCongestedError) as error:
            raise OSError(f"{record.host} cannot be reached: {error}") from None
        self._hosts.launched(index, identity)
        self._exits[identity] = on_exit
        return RemoteProcess(record.pid, lambda number: self._signal(identity, number))

    def _signal(self, identity: str, number: int) -> None:
        link = self._hosts.link_of(identity)
        if link is not None:
            self._carry_out([SendToHost(link, SignalWorker(identity=identity, signal=number))])

    def _handle(self, link: str, message: HostUp | ProtocolError) -> None:
        if isinstance(message, ProtocolError):
            _logger.warning("dropped a message of %s: %s", link, message)
            return
        self._carry_out(self._hosts.handle(link, message, self._clock()))

    def start(self) -> None:
        """Start to watch the hosts, in the running loop."""
        self._schedule()

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._expected_at = self._clock() + self._times.heartbeat_s
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._times.heartbeat_s, self._heartbeat)

    def _heartbeat(self) -> None:
        now = self._clock()
        if now - self._expected_at > self._times.heartbeat_s:
            # This process was suspended, so messages that arrived meanwhile are still unread.
            self._hosts.reset_silence(now)
        self._carry_out(self._hosts.heartbeat(now))
        self._schedule()

    def _carry_out(self, actions: list[HostAction]) -> None:
        pending = [*actions]
        while pending:
            match pending.pop(0):
                case SendToHost(link=link, message=message):
                    pending += self._send(link, message)
                case WorkerEnded(worker=worker, status=status):
                    self._exits.pop(worker)(status)
                case action:
                    assert_never(action)

    def _send(self, link: str, message: HostDown) -> list[HostAction]:
        try:
            self._wire.send_host(link, message)
        except NotConnectedError:
            return self._hosts.disconnected(link)
        except PeerCongestedError as error:
            # If the congestion lasts, the host falls silent and is given up.
            _logger.warning("%s did not get a %s: %s", link, message.tag, error)
        return []


class RemoteProcess:
    """A worker on another machine. Its host reports the exit; a silent host counts as an exit."""

    def __init__(self, pid: int, send: Callable[[int], None]) -> None:
        self._pid: Final = pid
        self._send: Final = send

    @property
    def pid(self) -> int:
        """The pid of the worker's host: the worker's own pid is not known here."""
        return self._pid

    @property
    def halted(self) -> bool:
        """Always False: the controller cannot see whether a remote process is stopped."""
        return False

    def abort(self) -> None:
        self._send(signal.SIGABRT)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
