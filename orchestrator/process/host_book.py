"""Which hosts offer a place to remote workers. Events and the time go in, steps come out."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.host_messages import (
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
    """How often both sides speak, and after how much silence each gives the other up."""

    beat_s: float
    silence_s: float


@dataclass(slots=True)
class HostRecord:
    """The place of one rank. ``link`` is empty while nobody offers it."""

    rank: int
    link: str = ""
    host: str = ""
    pid: int = 0
    heard_at: float = 0.0
    worker: str = ""
    """The identity of the worker that was last launched there, until it has ended."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send this to a host."""

    link: str
    message: HostDown


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """This worker does not run any longer, or its host is not heard, which is as good."""

    worker: str
    status: int


HostStep = Say | WorkerEnded


class HostBook:
    """One record for each rank that runs on another machine."""

    def __init__(self, ranks: Iterable[int], times: HostTimes) -> None:
        self._records: Final = {rank: HostRecord(rank) for rank in ranks}
        self._times: Final = times

    def of(self, rank: int) -> HostRecord:
        return self._records[rank]

    def knows(self, rank: int) -> bool:
        """Whether this rank runs on another machine."""
        return rank in self._records

    def launched(self, rank: int, worker: str) -> None:
        """A worker was sent to the host of this rank."""
        record = self._records[rank]
        assert record.link, f"rank {rank} has no host"
        assert not record.worker, f"rank {rank} runs {record.worker} already"
        record.worker = worker

    def link_of(self, worker: str) -> str | None:
        """The host that runs this worker, or None once it has ended."""
        links = (each.link for each in self._records.values() if each.worker == worker)
        return next(links, None)

    def take(self, link: str, fact: HostUp, now: float) -> list[HostStep]:
        """Take in what a host says."""
        if isinstance(fact, Join):
            return self._join(link, fact, now)
        record = next((each for each in self._records.values() if each.link == link), None)
        if record is None:
            # It was given up, and does not know: whatever it runs has to end.
            return [Say(link, Deny(reason="the controller had not heard it", final=False))]
        record.heard_at = now
        match fact:
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
                assert_never(fact)

    def _join(self, link: str, join: Join, now: float) -> list[HostStep]:
        record = self._records.get(join.rank)
        if record is None:
            reason = (
                f"--rank {join.rank} is not for another machine: use --rank "
                f"{_alternatives(sorted(self._records))}"
            )
            return [Say(link, Deny(reason=reason, final=True))]
        if record.link not in ("", link):
            reason = (
                f"--rank {join.rank} is taken by {record.host} (pid {record.pid}): use another "
                "--rank, or end mlx-dp worker there"
            )
            return [Say(link, Deny(reason=reason, final=False))]
        if not record.link:
            _logger.info("rank %s: %s offers a place, pid %s", join.rank, join.host, join.pid)
        record.link, record.host, record.pid = link, join.host, join.pid
        record.heard_at = now
        times = self._times
        return [Say(link, Welcome(beat_s=times.beat_s, silence_s=times.silence_s))]

    def beat(self, now: float) -> list[HostStep]:
        """Give up who is silent, and tell the others that we are there."""
        steps: list[HostStep] = []
        for record in self._records.values():
            if not record.link:
                continue
            silent_s = now - record.heard_at
            if silent_s > self._times.silence_s:
                _logger.warning(
                    "rank %s: %s was not heard for %.1f s", record.rank, record.host, silent_s
                )
                steps += self._drop(record)
            else:
                steps.append(Say(record.link, Ping()))
        return steps

    def unreachable(self, link: str) -> list[HostStep]:
        """Its connection is gone."""
        for record in self._records.values():
            if record.link == link:
                _logger.warning("rank %s: %s is not connected", record.rank, record.host)
                return self._drop(record)
        return []

    def forgive(self, now: float) -> None:
        """The controller slept: nobody is silent because of that."""
        for record in self._records.values():
            record.heard_at = now

    def _drop(self, record: HostRecord) -> list[HostStep]:
        worker, record.worker, record.link, record.host = record.worker, "", "", ""
        return [WorkerEnded(worker, ExitCode.HOST_LOST)] if worker else []


def _alternatives(ranks: list[int]) -> str:
    """Remote ranks are the last ones, so that they follow each other."""
    first, last = ranks[0], ranks[-1]
    match len(ranks):
        case 1:
            return str(first)
        case 2:
            return f"{first} or {last}"
        case _:
            return f"{first} to {last}"
