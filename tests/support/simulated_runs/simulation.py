"""One run: controller, workers, wire and clients of a schedule, checked from start to end."""

import random
from collections.abc import Callable
from typing import Final
from unittest.mock import patch

from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.worker_states import WorkerStatus
from mlx_dp.proto.capacity import request_limits as admission
from tests.support.simulated_runs.injection import Injection
from tests.support.simulated_runs.invariants import Invariants
from tests.support.simulated_runs.meeting_places import MeetingPlaces
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.clients import Client
from tests.support.simulation.controller_host import LIVENESS, ControllerHost
from tests.support.simulation.grants import GrantWatch
from tests.support.simulation.machine import Machine
from tests.support.simulation.schedule import SLEEPS, Schedule
from tests.support.simulation.wire import Wire

PATIENCE_S = 60.0
"""From the last fault to quiet. Every request time-out is longer, so none can help."""
REST_S = 0.6
ANSWER_TOKENS = 4
"""Tokens for which owners reserve memory at a time: few, so that responses outgrow it."""


class Simulation:
    """Runs a schedule once. Raises AssertionError where an invariant does not hold."""

    def __init__(self, schedule: Schedule) -> None:
        rng = random.Random(f"{schedule.seed} run")
        setting = schedule.setting
        self._schedule = schedule
        self._agenda = Agenda()
        self._began_at = self._agenda.now
        self._watch = GrantWatch(
            self._agenda,
            self._has_ended,
            max_attempts=setting.max_attempts,
            accept_timeout_s=LIVENESS.accept_timeout_s,
        )
        self._host = ControllerHost(setting, self._agenda, rng, self._watch)
        wire = Wire(self._agenda, rng, setting.latency_s, self._watch, self._host.arrived)
        self._machine = Machine(setting, self._agenda, rng, wire, self._watch, self._host.do)
        self._clients = [Client(arrival) for arrival in schedule.arrivals]
        self._by_id: dict[int, Client] = {}
        self._injection = Injection(self._agenda, self._host, self._machine)
        self._invariants = Invariants(
            schedule, self._agenda, self._host, self._machine, self._watch, self._clients
        )
        self._host.open(ControlPorts(wire, self._machine, MeetingPlaces()))
        self.core: Final = self._host.core
        self.events = 0

    def run(self) -> "Simulation":
        with patch.object(admission, "NEXT_ANSWER_TOKENS", ANSWER_TOKENS):
            self._run()
        return self

    def _run(self) -> None:
        for fault in self._schedule.faults:
            self._injection.plan(self._began_at + fault.at, fault)
        for client in self._clients:
            self._plan(client)
        end = self._began_at + self._schedule.end
        self._agenda.at(end, self._injection.disarm)
        self._until(lambda: self._agenda.now > end and self._quiet(), end + PATIENCE_S)
        rested_at = self._agenda.now + REST_S
        self._until(lambda: self._agenda.now >= rested_at, rested_at + 1.0)
        for client in self._by_id.values():
            self._read(client)
        self._invariants.quiet()

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        while not done():
            self._agenda.step()
            self.events += 1
            assert self._agenda.now < deadline, f"never quiet: {self._unquiet()}"
            if self._host.acted:
                self._host.acted = False
                for client in self._reading:
                    self._read(client)
                self._invariants.each()

    @property
    def _reading(self) -> list[Client]:
        """Clients that read as soon as there is an event."""
        clients = self._by_id.values()
        return [each for each in clients if each.open and not each.arrival.reads_every_s]

    def _read(self, client: Client) -> None:
        was_open = client.open
        client.read(self._leave)
        if was_open and not client.open:
            self._invariants.ended(client)

    def _plan(self, client: Client) -> None:
        arrival = client.arrival
        self._agenda.at(
            self._began_at + arrival.at, lambda: self._host.do(lambda: self._ask(client))
        )
        if arrival.leaves_at is not None:
            leaves_at = self._began_at + arrival.leaves_at
            self._agenda.at(leaves_at, lambda: self._host.do(lambda: self._leave(client)))

    def _ask(self, client: Client) -> None:
        waiting = len(self.core.table.queue)
        client.ask(self.core)
        self._invariants.asked(client, waiting)
        if client.answer is None:
            return
        self._by_id[client.answer.request_id] = client
        if client.arrival.reads_every_s:
            self._read_later(client)

    def _read_later(self, client: Client) -> None:
        self._read(client)
        if client.open:
            every_s = client.arrival.reads_every_s
            self._agenda.after(every_s, lambda: self._host.do(lambda: self._read_later(client)))

    def _leave(self, client: Client) -> None:
        if client.answer is None:
            return
        request_id = client.answer.request_id
        holders = [holder for holder, held in self._watch.grants if held == request_id]
        client.leave()
        for holder in holders:
            self._expect_release(holder, request_id)

    def _expect_release(self, holder: str, request_id: int) -> None:
        """I12: within a step and 100 ms, when no other fault hits the worker."""
        index = int(holder[1 : holder.index("-")])
        sleeps = any(each.kind in SLEEPS for each in self._schedule.faults)
        if self._schedule.setting.group or sleeps or index in self._schedule.faulted:
            return
        setting = self._schedule.setting

        def look() -> None:
            held = self._watch.grants.get((holder, request_id))
            assert held is None, f"I12: {holder} still has {request_id}, which was left"

        self._agenda.after(0.1 + setting.step_s + 2 * setting.latency_s, look)

    def _has_ended(self, request_id: int) -> bool:
        client = self._by_id.get(request_id)
        return client is not None and client.answer is not None and client.answer._ended

    def _unquiet(self) -> list[str]:
        """Everything that is not yet at rest."""
        core = self.core
        found = [f"{each.arrival} has not asked" for each in self._clients if not each.asked]
        found += [f"request {held} is open" for held, each in self._by_id.items() if each.open]
        found += [f"{holder} has request {held}" for holder, held in self._watch.grants]
        found += [
            f"worker {worker.index} is {worker.status.value}"
            for worker in core.supervisor.workers
            if worker.status not in (WorkerStatus.READY, WorkerStatus.FAILED)
        ]
        found += [f"{each.identity} works" for each in self._machine.living if each.process.works]
        links = (each.link for each in self._machine.incarnations)
        found += ["frames are late" for link in links if link.up.late + link.down.late]
        lost = self._watch.lost
        found += [
            f"{each.identity} lives" for each in self._machine.living if each.identity in lost
        ]
        return found

    def _quiet(self) -> bool:
        return not self._host.asleep and self.core.lifecycle.idle and not self._unquiet()
