"""The history of each request on the wire: its owners, its losses, and forbidden messages."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_dp.orchestrator.control.workers.actions import BLAMELESS, RemoveOwner
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Abort, Down, Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    Finished,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    Tokens,
    Up,
)
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.schedule import POISON

POISON_DEATHS = 2
TOGETHER_S = 0.25


@dataclass(slots=True)
class Grant:
    """One grant, from its ``Submit`` to the event that returns it, or to its owner's loss."""

    identity: str
    epoch: int
    sent_at: float
    accepted: bool = False
    prefilled: bool = False
    suspect: bool = False
    made_progress: bool = False

    @property
    def on_trial(self) -> bool:
        return self.suspect and self.accepted and not self.made_progress


@dataclass(slots=True)
class Life:
    """One request, as far as the controller knows."""

    prompt: tuple[int, ...]
    grant: Grant | None = None
    epochs: int = 0
    emitted: list[int] = field(default_factory=list)
    losses: int = 0
    """Losses after Accepted since its last token, without correlated crashes and our own kills."""
    losses_before_accept: int = 0
    """The same for losses before Accepted."""
    deaths: int = 0
    poisoned: bool = False
    cached: int | None = None
    """Tokens of its prompt that the first owner to prefill it had; None before that."""


class GrantWatch:
    """A second account of grants, kept from messages and losses, which the controller's must equal.

    ``has_ended`` says whether the response of a request is complete, as its client would see
    it.
    """

    def __init__(
        self,
        agenda: Agenda,
        has_ended: Callable[[int], bool],
        *,
        max_attempts: int,
        accept_timeout_s: float,
    ) -> None:
        self._agenda = agenda
        self._has_ended = has_ended
        self._max_attempts = max_attempts
        self._accept_timeout_s = accept_timeout_s
        self.lives: dict[int, Life] = {}
        self.grants: dict[tuple[str, int], Grant] = {}
        """By incarnation and request, including withdrawn requests that are not returned yet."""
        self.lost: set[str] = set()
        """Incarnations that were given up."""
        self.deaths = 0
        self._died: list[tuple[float, set[int]]] = []
        """When workers died by their own fault, and the requests that each had accepted."""
        self.exited: set[str] = set()
        """Incarnations whose exit the controller has seen."""
        self.ready: set[str] = set()
        self.failed: set[str] = set()
        """Incarnations that have reported Failed."""

    def sent(self, identity: str, message: Down) -> None:
        """The controller's socket has taken a message."""
        match message:
            case Submit():
                self._submitted(identity, message)
            case Abort():
                # I12: an ended request is not aborted.
                grant = self.grants.get((identity, message.request_id))
                assert grant is not None, f"I12: {message} to {identity}, which has no such grant"
                assert grant.epoch == message.epoch, f"I5: {message} to {identity}: {grant}"
            case _:
                pass

    def _submitted(self, identity: str, submit: Submit) -> None:
        life = self.lives.setdefault(submit.request_id, Life(submit.prompt_ids))
        told = f"{submit} to {identity}"
        assert identity in self.ready, f"I7: not ready: {told}"
        assert identity not in self.lost, f"I7: given up: {told}"
        assert identity not in self.exited, f"I7: its process is gone: {told}"
        assert (identity, submit.request_id) not in self.grants, f"I2: it has it: {told}"
        assert life.grant is None or self._may_be_withdrawn(life.grant), f"I2: {life}: {told}"
        assert not self._has_ended(submit.request_id), f"I3: it has ended: {told}"
        # A message that could not be sent has used up an epoch as well.
        assert submit.epoch > life.epochs, f"I5: epoch {life.epochs} was the last: {told}"
        assert list(submit.output_ids) == life.emitted, f"I4: {life.emitted} is out: {told}"
        assert not life.poisoned, f"I6: {life}: {told}"
        assert not self.spent(life), f"I6: {life}: {told}"
        life.epochs = submit.epoch
        trials = [
            self.lives[request_id]
            for (at, request_id), grant in self.grants.items()
            if at == identity and grant.suspect and not grant.made_progress
        ]
        assert not trials, f"I6: it tries {trials}: {told}"
        life.grant = Grant(identity, submit.epoch, self._agenda.now, suspect=life.deaths > 0)
        self.grants[identity, submit.request_id] = life.grant

    def spent(self, life: Life) -> bool:
        """Whether it was lost as often as allowed; losses before accept have their own limit."""
        silent = self._max_attempts + POISON_DEATHS
        return life.losses >= self._max_attempts or life.losses_before_accept >= silent

    def _may_be_withdrawn(self, grant: Grant) -> bool:
        late = self._agenda.now - grant.sent_at > self._accept_timeout_s
        return late and not grant.accepted

    def received(self, identity: str, event: Up | ProtocolError) -> None:
        """The controller receives a message of an incarnation that it knows."""
        if identity in self.lost:
            return
        match event:
            case Ready():
                self.ready.add(identity)
            case Failed():
                self.failed.add(identity)
            case Tokens():
                self._emitted(identity, event)
            case Prefilled():
                self._prefilled(identity, event)
            case Accepted():
                grant = self._grant(identity, event.request_id, event.epoch)
                if grant is not None:
                    grant.accepted = True
            case Rejected():
                grant = self._grant(identity, event.request_id, event.epoch)
                if grant is not None and not grant.accepted:
                    self._release(grant, event.request_id)
            case Finished() | Preempted():
                self._given_back(identity, event)
            case _:
                pass

    def _prefilled(self, identity: str, event: Prefilled) -> None:
        grant = self._grant(identity, event.request_id, event.epoch)
        if grant is None or grant.prefilled or not grant.accepted:
            return
        grant.prefilled = True
        life = self._current(identity, event.request_id, event.epoch)
        if life is not None and life.cached is None:
            life.cached = min(event.cached_tokens, len(life.prompt))

    def _emitted(self, identity: str, event: Tokens) -> None:
        for chunk in event.chunks:
            life = self._current(identity, chunk.request_id, chunk.epoch)
            if life is None or life.grant is None:
                continue
            if not life.grant.prefilled or chunk.index > len(life.emitted):
                # Its sender is lost, and its later messages are not read.
                return
            if chunk.index == len(life.emitted):
                life.emitted += chunk.ids
                life.grant.made_progress = True
                life.losses = life.losses_before_accept = 0

    def _given_back(self, identity: str, event: Finished | Preempted) -> None:
        grant = self._grant(identity, event.request_id, event.epoch)
        if grant is None or not grant.accepted:
            return
        life = self._current(identity, event.request_id, event.epoch)
        # With tokens missing, it ends the owner and not the request.
        if life is None or event.num_tokens == len(life.emitted):
            self._release(grant, event.request_id)

    def _grant(self, identity: str, request_id: int, epoch: int) -> Grant | None:
        grant = self.grants.get((identity, request_id))
        return grant if grant is not None and grant.epoch == epoch else None

    def _current(self, identity: str, request_id: int, epoch: int) -> Life | None:
        """The request, if this is its present grant and a client still waits for the response."""
        grant = self._grant(identity, request_id, epoch)
        life = self.lives.get(request_id)
        if grant is None or life is None or life.grant is not grant:
            return None
        return None if self._has_ended(request_id) else life

    def _release(self, grant: Grant, request_id: int) -> None:
        del self.grants[grant.identity, request_id]
        life = self.lives[request_id]
        if life.grant is grant:
            life.grant = None

    def gave_up(self, gone: RemoveOwner) -> None:
        """The controller has given an incarnation up."""
        assert gone.identity not in self.lost, f"I20: {gone} is lost twice"
        self.lost.add(gone.identity)
        self.deaths += gone.loss.kind is not LossKind.RESTART
        lost = {key: grant for key, grant in self.grants.items() if key[0] == gone.identity}
        tried = gone.culprit and any(grant.on_trial for grant in lost.values())
        if gone.culprit:
            had = {request_id for (_, request_id), grant in lost.items() if grant.accepted}
            self._died.append((self._agenda.now, had))
        for (_, request_id), grant in lost.items():
            life = self.lives[request_id]
            if life.grant is grant and (grant.on_trial or not tried):
                laid = gone.culprit and not self._is_accident(request_id)
                self._count_loss(life, grant, gone, laid=laid)
            self._release(grant, request_id)

    def _is_accident(self, request_id: int) -> bool:
        """Whether workers have died together, some of them with this request and some without."""
        since = self._agenda.now - TOGETHER_S
        recent = [request_id in had for at, had in self._died if at >= since]
        return recent.count(True) >= 2 and False in recent

    def _count_loss(self, life: Life, grant: Grant, gone: RemoveOwner, *, laid: bool) -> None:
        if gone.loss.kind in BLAMELESS:
            return
        if not grant.accepted:
            life.losses_before_accept += 1
            return
        life.losses += not grant.made_progress
        life.deaths += laid
        most = POISON_DEATHS + (self._max_attempts if grant.made_progress else 0)
        life.poisoned = laid and life.deaths >= most

    @property
    def poisons(self) -> list[Life]:
        return [life for life in self.lives.values() if life.prompt[0] == POISON]
