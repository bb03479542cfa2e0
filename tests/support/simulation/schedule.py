"""A run as data: where it happens, who comes, and what goes wrong when. All of it from a seed."""

from dataclasses import dataclass, fields
from enum import StrEnum

from mlx_dp.orchestrator.api import Generation

VOCAB_SIZE = 200
POISON = VOCAB_SIZE - 1
"""A prompt that begins with this token kills whoever takes it."""
CONTEXT_LENGTH = 400


class FaultKind(StrEnum):
    """What a fault does, mostly to one worker's present incarnation or its connection."""

    DIE = "die"
    """Its process ends with ``status``."""
    DIE_SAYING = "die_saying"
    """The same, right before or ``after`` it has sent its ``nth`` message of this ``tag``."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT ``for_s`` later."""
    HANG = "hang"
    """Its loop turns no more; the process lives."""
    SLOW = "slow"
    """Each step takes 20 times as long, ``for_s``."""
    BOOT = "boot"
    """Its next ``nth`` starts go as ``boot`` says."""
    DROP = "drop"
    """The ``nth`` frame from now of this ``tag`` is lost."""
    REPEAT = "repeat"
    """It arrives twice, the second time ``for_s`` later."""
    LATE = "late"
    """It arrives ``for_s`` late, after those that were sent behind it."""
    GARBLE = "garble"
    """It arrives cut short."""
    CUT = "cut"
    """The connection breaks, with all that is under way, and is made again ``for_s`` later."""
    CONGEST = "congest"
    """The worker's queue is full ``for_s``."""
    DELAY = "delay"
    """Everything takes ``for_s`` longer, for as long."""
    RESTART = "restart"
    """Somebody asks for a new one, or for ``nth`` 2 for new ones of all. It is no fault at all."""
    SLEEP = "sleep"
    """The controller itself stops, ``for_s``."""
    SUSPEND = "suspend"
    """The whole machine stops, ``for_s``: a closed lid."""
    FLUSH = "flush"
    """All prefix caches are flushed, which is no fault at all."""


class Drawn(StrEnum):
    """What is drawn to go wrong in a run. With the seed, it says which run it is."""

    ALL = "all"
    FRAMES = "frames"
    SLEEPS = "sleeps"


class Boot(StrEnum):
    """How a start fails."""

    NO_PROCESS = "no_process"
    CRASH = "crash"
    NO_HELLO = "no_hello"
    NO_READY = "no_ready"
    CONFIG = "config"
    CONFIG_UNSAID = "config_unsaid"
    MEMORY = "memory"


FINAL_BOOTS = frozenset({Boot.CONFIG, Boot.CONFIG_UNSAID})
"""Memory that sufficed once may suffice again, so that those are another matter."""
HARMLESS_REPEATS = ("accepted", "prefilled", "tokens", "preempted", "finished", "rejected")
"""What is told twice is dropped the second time, and costs nobody anything."""
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
        """Only what says something."""
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
    """It leaves since it has all it wants."""
    reads_every_s: float = 0.0
    """0: as soon as there is something."""
    refused: bool = False
    """The service has to refuse it."""

    @property
    def poison(self) -> bool:
        return self.generation.prompt_ids[0] == POISON

    @property
    def unservable(self) -> bool:
        """The worker refuses it."""
        return self.generation.grammar is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``memory_tokens``: what one owner's bytes suffice for, in tokens; less than its pool."""

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
        """The command that runs it again, with all that was drawn, and only it."""
        test = "tests/faults/test_simulation.py::test_every_invariant_holds_in_every_run"
        return f"pytest {test} --draw {self.drawn} --seed {self.seed}"

    @property
    def faulted(self) -> frozenset[int]:
        """The workers to which something happens, by a fault or by what a client sends."""
        all_workers = frozenset(range(self.setting.size))
        if any(each.kind is FaultKind.RESTART and each.nth > 1 for each in self.faults):
            return all_workers
        if any(arrival.poison for arrival in self.arrivals):
            return all_workers
        struck = frozenset(each.worker for each in self.faults if not each.harmless)
        return all_workers if struck and self.setting.group else struck

    @property
    def deadly(self) -> bool:
        """Somebody may be lost by more than a restart."""
        harmful = [each for each in self.faults if not each.harmless]
        asked = all(each.kind is FaultKind.RESTART for each in harmful)
        return not asked or any(arrival.poison for arrival in self.arrivals)

    @property
    def end(self) -> float:
        """When nothing new happens any more."""
        return max(
            (
                *(arrival.at for arrival in self.arrivals),
                *(fault.at + fault.for_s for fault in self.faults),
            ),
            default=0.0,
        )

    @property
    def latest_s(self) -> float:
        """By how much any frame may be late."""
        late = (each.for_s for each in self.faults if each.kind in LATENESS)
        return max(late, default=0.0)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.setting}, {len(self.arrivals)} requests"]
        return "\n  ".join(lines + [str(fault) for fault in self.faults])
