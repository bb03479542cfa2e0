"""Injects the faults of a schedule when their time has come."""

from contextlib import suppress

from mlx_dp.orchestrator.worker_states import RestartRefusedError
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.controller_host import ControllerHost
from tests.support.simulation.machine import Incarnation, Machine
from tests.support.simulation.schedule import Fault, FaultKind


class Injection:
    """Acts on the incarnation that runs at that moment; without one, nothing happens."""

    def __init__(self, agenda: Agenda, host: ControllerHost, machine: Machine) -> None:
        self._agenda = agenda
        self._host = host
        self._machine = machine

    def plan(self, at: float, fault: Fault) -> None:
        self._agenda.at(at, lambda: self._inject(fault))

    def disarm(self) -> None:
        """From now on, messages trigger no fault."""
        for slot in self._machine.slots.values():
            slot.armed.disarm()
            slot.boots.clear()

    def _inject(self, fault: Fault) -> None:
        slot = self._machine.slots[fault.worker]
        match fault.kind:
            case FaultKind.SLEEP:
                self._host.sleep(fault.for_s)
            case FaultKind.SUSPEND:
                self._host.sleep(fault.for_s)
                for each in self._machine.living:
                    each.process.stop()
                    self._agenda.after(fault.for_s, each.process.resume)
            case FaultKind.FLUSH:
                self._host.do(self._flush)
            case FaultKind.RESTART:
                self._host.do(lambda: self._restart(fault))
            case FaultKind.BOOT:
                slot.boots += [fault.boot] * fault.nth
            case (
                FaultKind.DIE_SAYING
                | FaultKind.DROP
                | FaultKind.REPEAT
                | FaultKind.LATE
                | FaultKind.GARBLE
            ):
                slot.armed.arm(fault)
            case _:
                present = self._machine.present(fault.worker)
                if present is not None:
                    self._strike(present, fault)

    def _strike(self, target: Incarnation, fault: Fault) -> None:
        process, link = target.process, target.link
        match fault.kind:
            case FaultKind.DIE:
                process.die(fault.status)
            case FaultKind.STOP:
                process.stop()
                self._agenda.after(fault.for_s, process.resume)
            case FaultKind.HANG:
                process.hang()
            case FaultKind.SLOW:
                process.slow = True
                self._agenda.after(fault.for_s, process.recover)
            case FaultKind.CUT:
                link.break_off()
                self._agenda.after(fault.for_s, link.join)
            case FaultKind.CONGEST:
                link.congested = True
                self._agenda.after(fault.for_s, link.clear)
            case FaultKind.DELAY:
                link.up.extra_s = link.down.extra_s = fault.for_s
                self._agenda.after(fault.for_s, link.hurry)
            case _:
                raise AssertionError(f"{fault.kind} hits no worker")

    def _restart(self, fault: Fault) -> None:
        restarts = self._host.core.restarts
        with suppress(RestartRefusedError):
            if fault.nth > 1:
                restarts.request_all()
            else:
                restarts.request(fault.worker)

    def _flush(self) -> None:
        flushes = self._host.core.flushes
        flush_id = self._host.core.begin_flush()

        def end() -> None:
            flushes.end(flush_id)

        self._agenda.after(1.0, lambda: self._host.do(end))
