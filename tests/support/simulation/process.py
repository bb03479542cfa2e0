"""A worker process: the real loop, scheduler and fake engine, in virtual time."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Shutdown, Start
from mlx_dp.proto.messages.events import Failed, FailureKind, Hello
from tests.support.simulation.agenda import Act, Agenda
from tests.support.simulation.schedule import Boot, Setting
from tests.support.simulation.serving import Serving
from tests.support.simulation.worker_end import ProcessDiedError, WorkerEnd

SLOWNESS: Final = 20.0
CHECK_TURNS: Final = 8
"""Checks every slot and node, which takes as long as several loop runs."""


class SimulatedProcess:
    """``WorkerProcess``. While it is stopped or hangs, due acts wait."""

    def __init__(
        self,
        pid: int,
        boot: Boot | None,
        setting: Setting,
        agenda: Agenda,
        rng: random.Random,
        on_death: Callable[[int], None],
    ) -> None:
        self.pid = pid
        self.boot = boot
        self.died_at = math.inf
        """Never, so far."""
        self.stopped = False
        self.hung = False
        self.slow = False
        self.frozen_since: float | None = None
        self.serving: Serving | None = None
        self.end: WorkerEnd
        self._setting = setting
        self._agenda = agenda
        self._rng = rng
        self._on_death = on_death
        self._pending: list[Act] = []
        self._signals: list[int] = []
        self._turn_id = 0
        self._turns = 0
        self._deaf = rng.random() < 0.5
        """SIGABRT does not end it: continued after its loss, it sends events until SIGKILL."""

    @property
    def alive(self) -> bool:
        return self.died_at == math.inf

    @property
    def works(self) -> bool:
        """It runs requests, perhaps some that were cancelled."""
        if self.serving is None or not self.alive or self.hung:
            return False
        return len(self.serving.scheduler.requests) + self.end.unread > 0

    @property
    def halted(self) -> bool:
        return self.stopped and self.alive

    def abort(self) -> None:
        if not self._deaf:
            self._signal(-6)

    def kill(self) -> None:
        self.die(-9)

    def _signal(self, status: int) -> None:
        # Signals but SIGKILL wait until a stopped process is continued.
        if self.stopped:
            self._signals.append(status)
        else:
            self.die(status)

    def die(self, status: int) -> None:
        if self.alive:
            self.died_at = self._agenda.now
            self._on_death(status)

    def stop(self) -> None:
        self.stopped = True
        self._freeze()

    def resume(self) -> None:
        self.stopped = False
        for status in self._signals:
            self.die(status)
        if not self.hung:
            self.frozen_since = None
            pending, self._pending = self._pending, []
            for act in pending:
                self._agenda.after(0.0, partial(self._do, act))

    def recover(self) -> None:
        self.slow = False

    def hang(self) -> None:
        self.hung = True
        self._freeze()

    def _freeze(self) -> None:
        if self.frozen_since is None:
            self.frozen_since = self._agenda.now

    def begin(self, end: WorkerEnd) -> None:
        self.end = end
        if self.boot is not Boot.NO_HELLO:
            self._later(self._rng.uniform(0.01, 0.05), self._hello)

    def _later(self, delay_s: float, act: Act) -> None:
        self._agenda.after(delay_s, lambda: self._do(act))

    def _do(self, act: Act) -> None:
        if not self.alive:
            return
        if self.stopped or self.hung:
            self._pending.append(act)
            return
        try:
            act()
        except ProcessDiedError as death:
            self.die(death.status)

    def _hello(self) -> None:
        if self.boot is Boot.CRASH:
            self.die(int(ExitCode.CRASH))
            return
        self.end.send(Hello(pid=self.pid))

    def arrived(self, frame: bytes) -> None:
        """A frame has come: an idle loop wakes up."""
        self.end.arrived(frame)
        if self.serving is None:
            self._later(0.0, self._read_start)
        elif self.end.waits_s is not None:
            self._turn_after(0.0)

    def _read_start(self) -> None:
        for message in self.end.drain() if self.serving is None else ():
            match message:
                case Start():
                    if self.boot is not Boot.NO_READY:
                        self._later(self._rng.uniform(0.02, 0.2), partial(self._load, message))
                case Shutdown():
                    self.die(int(ExitCode.OK))
                case _:
                    pass

    def _load(self, start: Start) -> None:
        match self.boot:
            case Boot.CONFIG:
                self.end.send(Failed(kind=FailureKind.CONFIG, message="no such flag"))
                self.die(int(ExitCode.CONFIG))
            case Boot.CONFIG_UNSAID:
                self.die(int(ExitCode.CONFIG))
            case Boot.MEMORY:
                self.end.send(Failed(kind=FailureKind.OUT_OF_MEMORY, message="too big"))
                self.die(int(ExitCode.OUT_OF_MEMORY))
            case _:
                self._serve(start)

    def _serve(self, start: Start) -> None:
        self.serving = Serving.begin(start, self._setting, self._agenda, self.end)
        self._turn_after(0.0)

    def _turn_after(self, delay_s: float) -> None:
        self._turn_id += 1
        turn_id = self._turn_id
        self._later(delay_s, lambda: self._turn(turn_id))

    def _turn(self, turn_id: int) -> None:
        if turn_id != self._turn_id:
            return
        assert self.serving is not None
        end = self.end
        end.waits_s = None
        if end.poisoned:
            raise ProcessDiedError(-11)
        ended = self.serving.loop.run_once()
        self._turns += 1
        if end.waits_s is not None or self._turns % CHECK_TURNS == 0:
            self.serving.check()
        if ended is not None:
            self.die(int(ended))
        elif end.waits_s is not None:
            self._turn_after(end.waits_s)
        else:
            step_s = self._setting.step_s * self._rng.uniform(0.5, 1.0)
            self._turn_after(step_s * SLOWNESS if self.slow else step_s)
