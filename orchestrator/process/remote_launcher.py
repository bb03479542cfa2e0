"""Workers on other machines, which the hosts there start and end on our word."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from mlx_dp.orchestrator.control.ports import Launcher, WorkerProcess
from mlx_dp.orchestrator.process.host_book import HostBook, HostStep, HostTimes, Say, WorkerEnded
from mlx_dp.proto.controller_channel import TakeHost
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.host_messages import HostDown, HostUp, Launch, SignalWorker
from mlx_dp.proto.router_socket import PeerCongestedError, PeerLostError

_logger = logging.getLogger(__name__)


class HostWire(Protocol):
    """What this needs of the controller's channel."""

    def hear_hosts(self, take: TakeHost) -> None: ...

    def send_host(self, identity: str, message: HostDown) -> None:
        """Raises PeerLostError or PeerCongestedError; then nothing was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """What every host is to have: the controller's model, and how much it logs."""

    path: str
    fingerprint: str
    log_level: str


class RemoteLauncher:
    """Sends each remote worker to the host that has joined for its rank.

    Every other rank goes to ``local``.
    """

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
        self._book: Final = HostBook(ranks, times)
        self._exits: Final[dict[str, Callable[[int], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._expected_at = 0.0
        wire.hear_hosts(self._take)

    def host_of(self, index: int) -> str | None:
        """The machine of a remote worker, None while no host has joined; "" for ours."""
        if not self._book.knows(index):
            return ""
        record = self._book.of(index)
        return record.host if record.link else None

    def present(self) -> frozenset[int]:
        """The ranks that have a host now."""
        return frozenset(rank for rank in self._ranks if self._book.of(rank).link)

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """Start a worker; see ``worker_process.Launcher``."""
        if not self._book.knows(index):
            return self._local.spawn(index, identity, endpoint, on_exit)
        record = self._book.of(index)
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
        except (PeerLostError, PeerCongestedError) as error:
            raise OSError(f"{record.host} cannot be reached: {error}") from None
        self._book.launched(index, identity)
        self._exits[identity] = on_exit
        return RemoteProcess(record.pid, lambda number: self._signal(identity, number))

    def _signal(self, identity: str, number: int) -> None:
        link = self._book.link_of(identity)
        if link is not None:
            self._carry_out([Say(link, SignalWorker(identity=identity, signal=number))])

    def _take(self, link: str, said: HostUp | ProtocolError) -> None:
        if isinstance(said, ProtocolError):
            _logger.warning("dropped a message of %s: %s", link, said)
            return
        self._carry_out(self._book.take(link, said, self._clock()))

    def start(self) -> None:
        """Begin to watch the hosts, in the running loop."""
        self._schedule()

    def stop(self) -> None:
        """Watch nobody any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._expected_at = self._clock() + self._times.beat_s
        self._timer = asyncio.get_running_loop().call_later(self._times.beat_s, self._beat)

    def _beat(self) -> None:
        now = self._clock()
        if now - self._expected_at > self._times.beat_s:
            # We did not run ourselves, so that what was said meanwhile is still unread.
            self._book.forgive(now)
        self._carry_out(self._book.beat(now))
        self._schedule()

    def _carry_out(self, steps: list[HostStep]) -> None:
        pending = [*steps]
        while pending:
            match pending.pop(0):
                case Say(link=link, message=message):
                    pending += self._say(link, message)
                case WorkerEnded(worker=worker, status=status):
                    self._exits.pop(worker)(status)
                case step:
                    assert_never(step)

    def _say(self, link: str, message: HostDown) -> list[HostStep]:
        try:
            self._wire.send_host(link, message)
        except PeerLostError:
            return self._book.unreachable(link)
        except PeerCongestedError as error:
            # Its silence will tell, if it is more than a moment.
            _logger.warning("%s did not get a %s: %s", link, message.tag, error)
        return []


class RemoteProcess:
    """One worker on another machine. Its exit is what the host tells, or the host's silence."""

    def __init__(self, pid: int, send: Callable[[int], None]) -> None:
        self._pid: Final = pid
        self._send: Final = send

    @property
    def pid(self) -> int:
        """Of its host: the worker's own is not known here."""
        return self._pid

    @property
    def halted(self) -> bool:
        """Not known here."""
        return False

    def abort(self) -> None:
        self._send(signal.SIGABRT)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
