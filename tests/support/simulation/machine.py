"""The machine under the controller: it makes processes, and ends them."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.simulation.agenda import Agenda
from tests.support.simulation.armed import Armed
from tests.support.simulation.grants import GrantWatch
from tests.support.simulation.process import SimulatedProcess
from tests.support.simulation.schedule import FINAL_BOOTS, Boot, Setting
from tests.support.simulation.wire import Link, Wire
from tests.support.simulation.worker_end import WorkerEnd

UNSEEN_S = 0.02
"""The longest time from the end of a process until the controller sees it."""


@dataclass(slots=True)
class Incarnation:
    """One process with its connection."""

    index: int
    identity: str
    process: SimulatedProcess
    link: Link


@dataclass(slots=True)
class Slot:
    """One worker across its incarnations."""

    boots: list[Boot] = field(default_factory=list)
    armed: Armed = field(default_factory=Armed)
    spawned_at: list[float] = field(default_factory=list)
    failed_starts: int = 0
    """Starts since it was last ready."""
    final_boot: bool = False
    """It had a start that could not succeed."""
    final: bool = False
    """The controller has learnt that it can never start."""


class Machine:
    """``Launcher``. Asserts the invariants of every process that is made."""

    def __init__(
        self,
        setting: Setting,
        agenda: Agenda,
        rng: random.Random,
        wire: Wire,
        watch: GrantWatch,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self._setting = setting
        self._agenda = agenda
        self._rng = rng
        self._wire = wire
        self._watch = watch
        self._tell = tell
        self.slots: dict[int, Slot] = defaultdict(Slot)
        self.incarnations: list[Incarnation] = []
        self.epochs: dict[str, int] = {}
        """Equal for incarnations without a loss between them."""

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> SimulatedProcess:
        slot = self.slots[index]
        self._may_start(index, slot)
        slot.spawned_at.append(self._agenda.now)
        slot.failed_starts += 1
        self.epochs[identity] = len(self._watch.lost)
        boot = slot.boots.pop(0) if slot.boots else None
        slot.final_boot |= boot in FINAL_BOOTS or boot is Boot.MEMORY
        if boot is Boot.NO_PROCESS:
            raise OSError("no more processes")

        def died(status: int) -> None:
            self._wire.disconnect(identity)

            def seen() -> None:
                self._watch.exited.add(identity)
                known = identity not in self._watch.lost
                # In a group, the loss of another rank may have come first.
                told = identity in self._watch.failed or (known and not self._setting.group)
                slot.final |= boot in FINAL_BOOTS and told and status > 0
                on_exit(status)

            self._agenda.after(self._rng.uniform(0.0, UNSEEN_S), lambda: self._tell(seen))

        pid = 1000 + len(self.incarnations)
        process = SimulatedProcess(pid, boot, self._setting, self._agenda, self._rng, died)
        link = self._wire.connect(identity, slot.armed, process.arrived)
        end = WorkerEnd(link, slot.armed, lambda: self._wire.full(identity))
        self.incarnations.append(Incarnation(index, identity, process, link))
        process.begin(end)
        return process

    def _may_start(self, index: int, slot: Slot) -> None:
        assert not slot.final, f"I15: worker {index} starts again after a fatal failure"
        for each in self.incarnations:
            seen = each.identity in self._watch.exited
            lost = each.identity in self._watch.lost
            if each.index == index:
                assert seen, f"I15: {each.identity} may be there still"
            elif self._setting.group:
                assert seen or not lost, f"I18: {each.identity} of the epoch before is there"

    def present(self, index: int) -> Incarnation | None:
        """The newest incarnation, unless it is gone."""
        for each in reversed(self.incarnations):
            if each.index == index:
                return each if each.process.alive else None
        return None

    @property
    def living(self) -> list[Incarnation]:
        return [each for each in self.incarnations if each.process.alive]
