"""Takes in what workers say, and has a worker that breaks the protocol replaced."""

from typing import Final, assert_never

from mlx_dp.orchestrator.control.cache_flush import CacheFlushes
from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.fleet import Fleet
from mlx_dp.orchestrator.control.owner import Owner
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.request_desk import RequestDesk
from mlx_dp.orchestrator.control.supervisor import Supervisor
from mlx_dp.orchestrator.control.supervisor_steps import Loss, LossKind
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages import (
    Accepted,
    Failed,
    Finished,
    Flushed,
    Heartbeat,
    Hello,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    Tokens,
    Up,
)


class Inbox:
    """Hands each fact to the part that it concerns."""

    def __init__(
        self,
        supervisor: Supervisor,
        fleet: Fleet,
        book: OwnerBook,
        desk: RequestDesk,
        flushes: CacheFlushes,
        tally: Tally,
    ) -> None:
        self._supervisor: Final = supervisor
        self._fleet: Final = fleet
        self._book: Final = book
        self._desk: Final = desk
        self._facts: Final = desk.facts
        self._flushes: Final = flushes
        self._tally: Final = tally

    def take(self, identity: str, fact: Up | ProtocolError, now: float) -> None:
        """Take in one message. An incarnation that was given up is not heard."""
        index = self._fleet.index_of(identity)
        if index is None:
            self._tally.stale_facts += 1
            return
        try:
            if isinstance(fact, ProtocolError):
                self._tally.malformed_frames += 1
                raise fact
            self._take(index, fact, now)
        except ProtocolError as error:
            self._tally.protocol_errors += 1
            loss = Loss(kind=LossKind.PROTOCOL, detail=str(error))
            self._fleet.carry_out(self._supervisor.lost(index, loss, now), now)

    def _take(self, index: int, fact: Up, now: float) -> None:
        match fact:
            case Tokens():
                owner = self._owner(index, fact.tag)
                owner.pulse.moved(now)
                self._facts.tokens(owner, fact, now)
            case Accepted():
                self._facts.accepted(self._heard(index, fact.tag, now), fact)
            case Prefilled():
                self._facts.prefilled(self._heard(index, fact.tag, now), fact)
            case Finished():
                self._facts.finished(self._heard(index, fact.tag, now), fact, now)
            case Preempted():
                self._facts.preempted(self._heard(index, fact.tag, now), fact, now)
            case Rejected():
                self._facts.rejected(self._heard(index, fact.tag, now), fact, now)
            case Flushed():
                self._flushed(self._heard(index, fact.tag, now), fact)
            case Heartbeat():
                self._beat(index, fact, now)
            case Hello():
                self._fleet.carry_out(self._supervisor.greeted(index, now), now)
            case Ready():
                self._fleet.ready(index, fact, now)
            case Failed():
                self._fleet.carry_out(self._supervisor.failed(index, fact, now), now)
            case _:
                assert_never(fact)

    def _flushed(self, owner: Owner, fact: Flushed) -> None:
        self._desk.forget_prefixes(owner.index)
        if not self._flushes.flushed(owner.index, fact):
            self._tally.stale_facts += 1

    def _owner(self, index: int, tag: str) -> Owner:
        owner = self._book.get(index)
        if owner is None:
            raise ProtocolError(f"worker {index}: {tag} before it was ready")
        return owner

    def _heard(self, index: int, tag: str, now: float) -> Owner:
        owner = self._owner(index, tag)
        owner.pulse.heard(now)
        return owner

    def _beat(self, index: int, heartbeat: Heartbeat, now: float) -> None:
        self._fleet.beat(index, heartbeat)
        self._supervisor.heard(index, heartbeat.phase, now)
        owner = self._book.get(index)
        if owner is None:
            return
        # Messages arrive in the order in which they were sent, or the report of an end was lost.
        accepted = len(owner.leases) - len(owner.unaccepted)
        if heartbeat.running < accepted:
            raise ProtocolError(f"worker {index}: runs {heartbeat.running} of {accepted} requests")
        owner.beat(heartbeat, now)
