"""A run as data: workers, clients, and faults with their times. All of it from a seed."""

from dataclasses import dataclass, fields
from enum import StrEnum

from mlx_dp.orchestrator.api import Generation

VOCAB_SIZE = 200
POISON = VOCAB_SIZE - 1
"""A prompt that begins with this token kills the worker that runs it."""
CONTEXT_LENGTH = 400


class FaultKind(StrEnum):
    """The effect of a fault, mostly on one worker's present incarnation or its connection."""

    DIE = "die"
    """Its process ends with ``status``."""
    DIE_SAYING = "die_saying"
    """The same, right before or ``after`` it has sent its ``nth`` message of this ``tag``."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT ``for_s`` later."""
    HANG = "hang"
    """Its loop stops running; the process lives."""
    SLOW = "slow"
    """Each step takes 20 times as long, ``for_s``."""
    BOOT = "boot"
    """Its next ``nth`` starts go as ``boot`` says."""
    DROP = "drop"
    """The ``nth`` frame from now of this ``tag`` is lost."""
    REPEAT = "repeat"
    """It arrives twice, the second time ``for_s`` later."""
    LATE = "late"
    """It arrives ``for_s`` late, after frames that were sent later."""
    GARBLE = "garble"
    """It arrives truncated."""
    CUT = "cut"
    """The connection breaks with all frames in flight, and is made again ``for_s`` later."""
    CONGEST = "congest"
    """The worker's queue is full ``for_s``."""
    DELAY = "delay"
    """Everything takes ``for_s`` longer, for as long."""
    RESTART = "restart"
    """A restart of this worker is requested, or of all for ``nth`` 2. It is not a fault."""
    SLEEP = "sleep"
    """The controller itself stops, ``for_s``."""
    SUSPEND = "suspend"
    """The whole machine stops, ``for_s``: a closed lid."""
    FLUSH = "flush"
    """All prefix caches are flushed. It is not a fault."""


class Drawn(StrEnum):
    """The kinds of faults drawn in a run. Together with the seed it identifies the run."""

    ALL = "all"
    FRAMES = "frames"
    SLEEPS = "sleeps"


class Boot(StrEnum):
    """The way in which a start fails."""

    NO_PROCESS = "no_process"
    CRASH = "crash"
    NO_HELLO = "no_hello"
    NO_READY = "no_ready"
    CONFIG = "config"
    CONFIG_UNSAID = "config_unsaid"
    MEMORY = "memory"


FINAL_BOOTS = frozenset({Boot.CONFIG, Boot.CONFIG_UNSAID})
"""Not a lack of memory: a later start may have enough."""
HARMLESS_REPEATS = ("accepted", "prefilled", "tokens", "preempted", "finished", "rejected")
"""A duplicate is dropped, and no other request suffers."""
LATENESS = frozenset({FaultKind.LATE, FaultKind.REPEAT, FaultKind.DELAY, FaultKind.CUT})
SLEEPS = frozenset({FaultKind.SLEEP, FaultKind.SUSPEND})
GLOBAL_FAULTS = SLEEPS | {FaultKind.FLUSH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at: float
    """Seconds from the start of the run."""
    kind: FaultKind
    worker: int = 0
    for_s: float = 0.0
    tag: str = ""
    nth: int = 1
    after: bool = False
    status: int = -9
    boot: Boot = Boot.CRASH

    @property
    def harmless(self) -> bool:
        """No worker may be lost because of it."""
        repeats = self.kind is FaultKind.REPEAT and self.tag in HARMLESS_REPEATS
        return repeats or self.kind in GLOBAL_FAULTS

    def __str__(self) -> str:
        """Only messages that announce something."""
        told = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if each.name not in ("at", "kind") and getattr(self, each.name) != each.default
        ]
        return f"{self.at:.3f} {self.kind} {' '.join(told)}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One client. It leaves after so many tokens, or at a time; None: it stays."""

    at: float
    generation: Generation
    leaves_after: int | None = None
    leaves_at: float | None = None
    content: bool = False
    """It leaves since it has read enough."""
    reads_every_s: float = 0.0
    """0: as soon as there is an event."""
    refused: bool = False
    """The service must refuse it."""

    @property
    def poison(self) -> bool:
        return self.generation.prompt_ids[0] == POISON

    @property
    def unservable(self) -> bool:
        """The worker rejects it."""
        return self.generation.grammar is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``memory_tokens``: the capacity of one owner's memory, in tokens; less than its pool."""

    group: bool
    size: int
    slots: int
    pool: int | None
    memory_tokens: int
    hybrid: bool
    prefix_cache: bool
    method: str
    max_attempts: int
    max_restarts: int
    step_s: float
    latency_s: float
    max_queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    seed: int
    setting: Setting
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]
    drawn: Drawn = Drawn.ALL

    @property
    def replay(self) -> str:
        """The command that repeats exactly this run, with the same kinds of faults."""
        test = "tests/faults/test_simulation.py::test_every_invariant_holds_in_every_run"
        return f"pytest {test} --draw {self.drawn} --seed {self.seed}"

    @property
    def faulted(self) -> frozenset[int]:
        """The workers that are hit by a fault or by a client's request."""
        all_workers = frozenset(range(self.setting.size))
        if any(each.kind is FaultKind.RESTART and each.nth > 1 for each in self.faults):
            return all_workers
        if any(arrival.poison for arrival in self.arrivals):
            return all_workers
        struck = frozenset(each.worker for each in self.faults if not each.harmless)
        return all_workers if struck and self.setting.group else struck

    @property
    def deadly(self) -> bool:
        """A worker may be lost by more than a restart."""
        harmful = [each for each in self.faults if not each.harmless]
        asked = all(each.kind is FaultKind.RESTART for each in harmful)
        return not asked or any(arrival.poison for arrival in self.arrivals)

    @property
    def end(self) -> float:
        """The time after which nothing new happens."""
        return max(
            (
                *(arrival.at for arrival in self.arrivals),
                *(fault.at + fault.for_s for fault in self.faults),
            ),
            default=0.0,
        )

    @property
    def latest_s(self) -> float:
        """The longest delay of any frame."""
        late = (each.for_s for each in self.faults if each.kind in LATENESS)
        return max(late, default=0.0)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.setting}, {len(self.arrivals)} requests"]
        return "\n  ".join(lines + [str(fault) for fault in self.faults])
