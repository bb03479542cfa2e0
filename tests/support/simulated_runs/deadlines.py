"""Deadlines by which the controller must react, by the clock of an awake controller."""

from collections.abc import Iterator

from mlx_dp.orchestrator.control.state.owner import Hold, Owner
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.clients import Client
from tests.support.simulation.controller_host import CHUNK_TOKENS, LIVENESS, ControllerHost
from tests.support.simulation.grants import GrantWatch
from tests.support.simulation.machine import Incarnation, Machine
from tests.support.simulation.schedule import Schedule

FROZEN_S = LIVENESS.hang_timeout_s + 2 * CHUNK_TOKENS / LIVENESS.slowest_prefill_tokens_per_s + 0.7
GHOST_S = 1.5
"""An expired worker must have ended after this time, on a machine that is never late."""
UNROUTABLE_S = 0.1
PARTED_S = 0.3
"""By then an exit is seen and settled, and the others of a group are given up."""
STUCK_S = 0.3
"""A few ticks: a free slot is granted with the event that freed it."""


class Deadlines:
    """Checks deadlines, as part of the invariants. The controller's sleeps do not count."""

    def __init__(
        self,
        schedule: Schedule,
        agenda: Agenda,
        host: ControllerHost,
        machine: Machine,
        watch: GrantWatch,
        clients: list[Client],
    ) -> None:
        self._schedule = schedule
        self._agenda = agenda
        self._host = host
        self._machine = machine
        self._watch = watch
        self._clients = clients
        self._lost_at: dict[str, float] = {}
        self._stuck_since: dict[int, float] = {}

    def each(self) -> None:
        """After every event of the controller."""
        self._nobody_is_frozen()
        self._nobody_lingers()
        self._the_dead_are_not_routable()
        self._a_group_parts_together()
        self._nobody_waits_beside_an_empty_owner()

    def _passed_s(self, since: float) -> float:
        """The least time for which the controller was awake since then."""
        return self._agenda.now - max(since, self._host.woke_at)

    def _nobody_is_frozen(self) -> None:
        """I9: a worker without progress is given up."""
        # A late frame counts as a sign of life as well.
        most_s = FROZEN_S + self._schedule.latest_s
        for each in self._machine.living:
            since = each.process.frozen_since
            if since is not None and self._serves(each):
                frozen_s = self._passed_s(since)
                assert frozen_s < most_s, f"I9: {each.identity} is frozen since {frozen_s} s"

    def _serves(self, each: Incarnation) -> bool:
        """As far as the controller knows."""
        return each.identity in self._watch.ready and each.identity not in self._watch.lost

    def _nobody_lingers(self) -> None:
        """A worker that was given up ends."""
        for each in self._machine.living:
            if each.identity not in self._watch.lost:
                continue
            late_s = self._passed_s(self._lost_at.setdefault(each.identity, self._agenda.now))
            assert late_s < GHOST_S, f"I9: {each.identity} lives {late_s} s after its loss"

    def _dead_for(self, least_s: float) -> Iterator[Incarnation]:
        for each in self._machine.incarnations:
            if self._passed_s(each.process.died_at) > least_s:
                yield each

    def _the_dead_are_not_routable(self) -> None:
        """I9: a process that has ended gets nothing after 100 ms, and soon holds nothing."""
        for each in self._dead_for(UNROUTABLE_S):
            owner = self._host.core.ranks.get(each.index)
            if owner is None or owner.identity != each.identity:
                continue
            assert Hold.CLOSED in owner.holds, f"I9: {each.identity} is dead and routable"
            assert self._passed_s(each.process.died_at) < PARTED_S, (
                f"I9: {owner} is dead and in the ranks"
            )

    def _a_group_parts_together(self) -> None:
        """I18: no rank computes on beside a dead member of its group."""
        if not self._schedule.setting.group:
            return
        epochs = self._machine.epochs
        broken = {epochs[each.identity] for each in self._dead_for(PARTED_S)}
        for each in self._machine.living if broken else ():
            parted = not self._serves(each) or epochs[each.identity] not in broken
            assert parted, f"I18: {each.identity} serves on with a dead member"

    def _nobody_waits_beside_an_empty_owner(self) -> None:
        """I9: a request that lost its owner, or has none yet, gets one as soon as one is free.

        So its client receives something, unless all owners are busy.
        """
        owners = self._host.core.ranks.owners()
        empty = [owner for owner in owners if owner.takes_requests and not owner.grants]
        now = self._agenda.now
        stuck = [] if not empty else [*self._waiting_beside(empty)]
        self._stuck_since = {each: self._stuck_since.get(each, now) for each in stuck}
        for request_id, since in self._stuck_since.items():
            waited_s = self._passed_s(since)
            assert waited_s < STUCK_S, f"I9: {request_id} waits for {waited_s} s: {empty}"

    def _waiting_beside(self, empty: list[Owner]) -> Iterator[int]:
        """Requests that wait although one of these could have them."""
        for client in self._clients:
            if client.answer is None or client.answer._ended:
                continue
            life = self._watch.lives.get(client.answer.request_id)
            if life is not None and life.grant is not None:
                continue
            # A pinned rank holds until the first token is sent.
            moved = life is not None and life.emitted
            rank = None if moved else client.arrival.generation.routed_dp_rank
            if any(rank in (None, owner.dp_rank) for owner in empty):
                yield client.answer.request_id
