"""Invariants after every event, and in the quiet state at the end."""

from collections import Counter

from mlx_dp.orchestrator.api import ServiceStatus
from mlx_dp.orchestrator.worker_states import WorkerStatus
from mlx_dp.proto.messages.commands import Flush
from mlx_dp.proto.messages.events import FinishReason
from tests.support.simulated_runs.deadlines import Deadlines
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.clients import Client
from tests.support.simulation.controller_host import WINDOW_S, ControllerHost
from tests.support.simulation.grants import POISON_DEATHS, GrantWatch
from tests.support.simulation.machine import Machine
from tests.support.simulation.schedule import FaultKind, Schedule


class Invariants:
    """The numbers are those of the reliability document."""

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
        self._failed: set[int] = set()
        self._deadlines = Deadlines(schedule, agenda, host, machine, watch, clients)

    def each(self) -> None:
        """After every event of the controller."""
        core = self._host.core
        assert core.failure is None, core.failure
        core.check()
        self._grants_agree()
        self._the_lost_are_not_heard()
        self._counters_reconcile()
        self._group_is_one()
        self._starts_are_bounded()
        self._deadlines.each()

    def _grants_agree(self) -> None:
        """I1, I2: the controller's grants are the grants that the wire has shown."""
        core = self._host.core
        granted = {
            (owner.identity, grant.request_id): (
                *(grant.epoch, grant.accepted),
                *(grant.suspect, grant.made_progress),
            )
            for owner in core.ranks.owners()
            for grant in owner.grants.values()
        }
        grants = {
            key: (grant.epoch, grant.accepted, grant.suspect, grant.made_progress)
            for key, grant in self._watch.grants.items()
        }
        assert granted == grants, f"I2: {granted}, but {grants}"
        for owner in core.ranks.owners():
            held = sum(identity == owner.identity for identity, _ in grants)
            free = self._schedule.setting.slots + owner.ahead - held
            assert owner.free_slots == free, f"I1: {owner} has {free} free slots"

    def _the_lost_are_not_heard(self) -> None:
        """I5: events of a lost incarnation are ignored."""
        fleet = self._host.core.fleet
        for identity in self._watch.lost:
            assert fleet.index_of(identity) is None, f"I5: {identity} is heard"

    def _counters_reconcile(self) -> None:
        """I20."""
        core, counters = self._host.core, self._host.core.counters
        ended = counters.requests_ok + counters.requests_error + counters.requests_aborted
        assert counters.requests_started == ended + len(core.streams), f"I20: {counters}"
        deaths = self._watch.deaths
        assert counters.worker_deaths == deaths, f"I20: {counters}, {deaths} seen"
        restarts = sum(max(0, len(each.spawned_at) - 1) for each in self._machine.slots.values())
        assert counters.worker_restarts == restarts, f"I20: {counters.worker_restarts}, {restarts}"

    def _group_is_one(self) -> None:
        """I18: all serving ranks belong to one epoch."""
        core = self._host.core
        if self._schedule.setting.group:
            epochs = {self._machine.epochs.get(owner.identity) for owner in core.ranks.owners()}
            assert len(epochs) <= 1, f"I18: {epochs}"

    def _starts_are_bounded(self) -> None:
        """I15, and no worker is given up that has starts left."""
        setting, supervisor = self._schedule.setting, self._host.core.supervisor
        asked = sum(fault.kind is FaultKind.RESTART for fault in self._schedule.faults)
        for index, worker in enumerate(supervisor.workers):
            slot = self._machine.slots[index]
            recent = [time for time in slot.spawned_at[1:] if self._agenda.now - time < WINDOW_S]
            # A restart counts from its decision, which comes before its process.
            most = setting.max_restarts + 1 + asked
            assert len(recent) <= most, f"I15: {index}: {slot.spawned_at}"
            if worker.status is WorkerStatus.READY:
                slot.failed_starts = 0
            if worker.status is not WorkerStatus.FAILED or index in self._failed:
                continue
            self._failed.add(index)
            spent = max(len(recent), slot.failed_starts) >= setting.max_restarts
            final = any(each.final_boot for each in self._machine.slots.values())
            assert spent or final or setting.group, f"I15: {index} had starts left: {slot}"

    def asked(self, client: Client, waiting: int) -> None:
        """I11: the queue has a limit and keeps it. Rejected requests get the reason."""
        most = self._schedule.setting.max_queued
        if client.answer is not None:
            assert waiting < most, f"I11: {waiting} wait, of {most}, and one more"
        elif client.overload is not None and client.overload.status == 429:
            assert waiting >= most, f"I11: only {waiting} wait, of {most}: {client.overload}"
        elif client.overload is not None:
            rank = client.arrival.generation.routed_dp_rank
            present = self._host.core.status() in (ServiceStatus.READY, ServiceStatus.RESTARTING)
            assert rank is not None or not present, f"I17: {client.overload}"

    def ended(self, client: Client) -> None:
        """I6 and I8, when a response has ended."""
        assert client.ended is not None and client.answer is not None
        life = self._watch.lives.get(client.answer.request_id)
        emitted, cached = (0, None) if life is None else (len(life.emitted), life.cached)
        assert client.num_tokens == emitted, f"I8: {client.num_tokens} of {life}"
        assert client.cached_tokens in (None, cached), f"I8: {client.cached_tokens} of {life}"
        if client.ended.reason is not FinishReason.ERROR:
            return
        match client.ended.code:
            case "worker_lost":
                assert life is not None, client.ended
                assert self._watch.spent(life), f"I6: {life} had attempts left: {client.ended}"
            case "request_crashed_worker":
                assert life is not None, client.ended
                assert life.deaths >= POISON_DEATHS, f"I6: {life}: {client.ended}"
            case "no_worker" | "worker_failed":
                workers = self._host.core.supervisor.workers
                failed = any(worker.status is WorkerStatus.FAILED for worker in workers)
                assert failed, f"I3: {client.ended}"

    def quiet(self) -> None:
        """I1, I3, I8, I10 and I20, when nothing is left to do."""
        core, counters = self._host.core, self._host.core.counters
        for client in self._clients:
            assert client.ended is not None or client.turned_away, f"I3: pending: {client.arrival}"
        answered = [client for client in self._clients if client.answer is not None]
        assert counters.requests_started == len(answered), f"I20: {counters}"
        errors = Counter(
            client.ended.code
            for client in answered
            if client.ended is not None and client.ended.reason is FinishReason.ERROR
        )
        assert counters.errors == errors, f"I20: {counters.errors}, {errors}"
        read = sum(client.num_tokens for client in answered)
        assert counters.generated_by_owner.total() == read, f"I8: {counters}, {read}"
        self._usage_is_counted_once()
        self._all_is_free_as_advertised()
        assert len(core.streams) == 0 and core.lifecycle.idle
        self._unfaulted_are_untouched()
        self._nobody_dies_of_nothing()
        for each in self._machine.living:
            self._is_empty(each.index)
        for life in self._watch.poisons:
            assert life.deaths <= POISON_DEATHS, f"I6: F9: {life}"

    def _usage_is_counted_once(self) -> None:
        """I8: each prompt and its cached tokens are counted once, despite recomputation."""
        counters = self._host.core.counters
        begun = [life for life in self._watch.lives.values() if life.cached is not None]
        prompts, cached = counters.prompt_by_owner.total(), counters.cached_by_owner.total()
        assert prompts == sum(len(life.prompt) for life in begun), f"I8: {prompts}: {begun}"
        assert cached == sum(life.cached or 0 for life in begun), f"I8: {cached}: {begun}"

    def _all_is_free_as_advertised(self) -> None:
        """I1: the reported slots are those of the serving owners, and nothing is held."""
        core = self._host.core
        states = [state for state in core.views.owners() if state.capacity is not None]
        shown = sum(state.capacity.request_slots for state in states if state.capacity)
        assert shown == self._schedule.setting.slots * len(core.ranks), f"I1: {shown} slots"
        for state in states:
            held = (state.running, state.prefilling, state.used_tokens, state.reserved_tokens)
            assert held == (0, 0, 0, 0), f"I1: {state.dp_rank} holds {held}"

    def _unfaulted_are_untouched(self) -> None:
        """I10: workers without a fault are never lost, even while others are."""
        for index, slot in self._machine.slots.items():
            if index not in self._schedule.faulted:
                assert len(slot.spawned_at) <= 1, f"I10: worker {index} was restarted: {slot}"

    def _nobody_dies_of_nothing(self) -> None:
        """I10 and I16: neither clocks nor requests may cost a worker its life."""
        if self._schedule.deadly:
            return
        counters = self._host.core.counters
        assert not counters.worker_deaths, f"I10, I16: workers had no fault: {counters.losses}"
        refused = {"rejected_invalid"}
        assert counters.errors.keys() <= refused, f"I10: requests had no fault: {counters.errors}"

    def _is_empty(self, index: int) -> None:
        """Only cached prefixes are held, and all of them can be dropped."""
        present = self._machine.present(index)
        if present is None or present.process.serving is None:
            return
        serving = present.process.serving
        serving.check()
        assert not len(serving.scheduler.requests), f"I1: {index} runs something still"
        serving.engine.compact()
        serving.scheduler.flush(Flush(flush_id=0))
        assert serving.engine.held_nbytes == 0, f"I1: {index} holds {serving.engine.held_nbytes}"
        assert serving.scheduler.auxiliary_used == 0, f"I1: {index} holds states"
