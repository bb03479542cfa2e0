"""The hosts that offer to run remote workers. Pure: messages and time in, actions out."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.host_messages import (
    Alive,
    Deny,
    HostDown,
    HostUp,
    Join,
    Leave,
    Ping,
    Welcome,
    WorkerExited,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """The interval of keep-alives, and the silence after which a side gives up the other."""

    heartbeat_s: float
    silence_s: float


@dataclass(slots=True)
class HostRecord:
    """The host of one rank. ``link`` is empty while the rank has no host."""

    rank: int
    link: str = ""
    host: str = ""
    pid: int = 0
    heard_at: float = 0.0
    worker: str = ""
    """The identity of the worker that runs there, or empty."""


@dataclass(frozen=True, slots=True)
class SendToHost:
    """Send a message to a host."""

    link: str
    message: HostDown


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker has exited, or its host was lost, which counts as an exit."""

    worker: str
    status: int


HostAction = SendToHost | WorkerEnded


class HostTable:
    """One record for each rank that runs on another machine."""

    def __init__(self, ranks: Iterable[int], times: HostTimes) -> None:
        self._records: Final = {rank: HostRecord(rank) for rank in ranks}
        self._times: Final = times

    def record(self, rank: int) -> HostRecord:
        return self._records[rank]

    def is_remote(self, rank: int) -> bool:
        """Whether this rank runs on another machine."""
        return rank in self._records

    def launched(self, rank: int, worker: str) -> None:
        """Note that a worker was launched on the host of this rank."""
        record = self._records[rank]
        assert record.link, f"rank {rank} has no host"
        assert not record.worker, f"rank {rank} runs {record.worker} already"
        record.worker = worker

    def link_of(self, worker: str) -> str | None:
        """The link to the host that runs this worker, or None once it has ended."""
        links = (each.link for each in self._records.values() if each.worker == worker)
        return next(links, None)

    def handle(self, link: str, message: HostUp, now: float) -> list[HostAction]:
        """Apply a message from a host."""
        if isinstance(message, Join):
            return self._join(link, message, now)
        record = next((each for each in self._records.values() if each.link == link), None)
        if record is None:
            # The host does not know that it was given up, and must end its worker.
            return [SendToHost(link, Deny(reason="the controller had not heard it", final=False))]
        record.heard_at = now
        match message:
            case Alive():
                return []
            case WorkerExited(identity=identity, status=status):
                if identity != record.worker:
                    return []
                record.worker = ""
                return [WorkerEnded(identity, status)]
            case Leave(reason=reason):
                _logger.warning("rank %s: %s leaves: %s", record.rank, record.host, reason)
                return self._drop(record)
            case _:
                assert_never(message)

    def _join(self, link: str, join: Join, now: float) -> list[HostAction]:
        record = self._records.get(join.rank)
        if record is None:
            reason = (
                f"--rank {join.rank} is not for another machine: use --rank "
                f"{_alternatives(sorted(self._records))}"
            )
            return [SendToHost(link, Deny(reason=reason, final=True))]
        if record.link not in ("", link):
            reason = (
                f"--rank {join.rank} is taken by {record.host} (pid {record.pid}): use another "
                "--rank, or end mlx-dp worker there"
            )
            return [SendToHost(link, Deny(reason=reason, final=False))]
        if not record.link:
            _logger.info("rank %s: %s offers a place, pid %s", join.rank, join.host, join.pid)
        record.link, record.host, record.pid = link, join.host, join.pid
        record.heard_at = now
        times = self._times
        return [SendToHost(link, Welcome(heartbeat_s=times.heartbeat_s, silence_s=times.silence_s))]

    def heartbeat(self, now: float) -> list[HostAction]:
        """Give up silent hosts, and send a keep-alive to the others."""
        actions: list[HostAction] = []
        for record in self._records.values():
            if not record.link:
                continue
            silent_s = now - record.heard_at
            if silent_s > self._times.silence_s:
                _logger.warning(
                    "rank %s: %s was not heard for %.1f s", record.rank, record.host, silent_s
                )
                actions += self._drop(record)
            else:
                actions.append(SendToHost(record.link, Ping()))
        return actions

    def disconnected(self, link: str) -> list[HostAction]:
        """Give up a host whose connection is gone."""
        for record in self._records.values():
            if record.link == link:
                _logger.warning("rank %s: %s is not connected", record.rank, record.host)
                return self._drop(record)
        return []

    def reset_silence(self, now: float) -> None:
        """Restart the silence of every host, after a time in which the controller did not run."""
        for record in self._records.values():
            record.heard_at = now

    def _drop(self, record: HostRecord) -> list[HostAction]:
        worker, record.worker, record.link, record.host = record.worker, "", "", ""
        return [WorkerEnded(worker, ExitCode.HOST_LOST)] if worker else []


def _alternatives(ranks: list[int]) -> str:
    """List consecutive ranks in words."""
    first, last = ranks[0], ranks[-1]
    match len(ranks):
        case 1:
            return str(first)
        case 2:
            return f"{first} or {last}"
        case _:
            return f"{first} to {last}"
