"""One row of the matrix: its service, clients and trials, and the check for leftovers."""

import asyncio
import random
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.faults.service.ports import lasting_port
from scripts.faults.service.process import ChaosService
from scripts.faults.trials.bystanders import Bystanders
from scripts.faults.trials.load import Load
from scripts.faults.verdicts.oracle import FakeOracle, ModelOracle, Oracle
from scripts.faults.verdicts.quiet import QUIET_S as QUIET_S
from scripts.faults.verdicts.quiet import SPARE_FDS as SPARE_FDS
from scripts.faults.verdicts.quiet import eventually as eventually
from scripts.faults.verdicts.quiet import look_after_end, look_at_rest
from scripts.faults.verdicts.record import ViolationRecord
from scripts.faults.verdicts.verdict import RowResult

FINDINGS: Final = Path(__file__).resolve().parents[3] / "build" / "chaos"
FAKE_FLAGS: Final = "--fake-"
MODEL_PATIENCE: Final = 3.0
STOP: Final = signal.SIGTERM

# Shortened, so that a row takes minutes; the ratios are the product's own.
HEARTBEAT_S: Final = 0.1
HANG_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The choices of the command line.

    ``slack``: a factor for every time bound. ``findings``: the folder of the violations.
    """

    trials: int
    seed: int
    model: Path | None
    workers: int
    streams: int
    slack: float
    findings: Path = FINDINGS

    def oracle(self, rng: random.Random, lengths: tuple[int, int]) -> Oracle:
        return FakeOracle(rng, lengths) if self.model is None else ModelOracle(rng, lengths)

    @property
    def patience(self) -> float:
        """How much slower a model may be than the fake engine, which computes nothing."""
        return 1.0 if self.model is None else MODEL_PATIENCE

    def again(self, row: str) -> str:
        """The command that repeats this row with the same choices."""
        flags = {
            "--rows": row,
            "--seed": self.seed,
            "--trials": self.trials,
            "--workers": self.workers,
            "--streams": self.streams,
            "--slack": f"{self.slack:g}",
        }
        if self.model is not None:
            flags["--mlx"] = self.model
        return shlex.join(
            ["scripts/chaos", *(str(word) for pair in flags.items() for word in pair)]
        )

    def record(self, row: str) -> ViolationRecord:
        return ViolationRecord(self.findings, row, self.seed, self.again(row))

    def engine(self, *, rate: float) -> tuple[str, ...]:
        """The flags of the engine; ``rate`` is the fake engine's decode rate."""
        if self.model is None:
            return ("--engine", "fake", "--fake-decode-rate", f"{rate:g}")
        return ("--model", str(self.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault. ``trial`` injects it once, and returns when the service has recovered.

    ``fresh``: each trial starts its own service. ``orders``: orders that its workers find at
    their start, see ``faults/service/hook``. ``bounds_s``: of detection and recovery.
    ``hang_s``: the hang time-out; None keeps the product's own times. ``possible``: whether
    this system allows the fault, see ``faults/service/system.py``.
    """

    name: str
    title: str
    trial: Callable[["Stage"], Awaitable[None]]
    arguments: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    rate: float = 200.0
    lengths: tuple[int, int] = (20, 120)
    fresh: bool = False
    load: bool = True
    bounds_s: tuple[float, float] = (float("inf"), float("inf"))
    hang_s: float | None = HANG_S
    possible: bool = True


class Stage:
    """The means of a trial. ``service`` and ``load`` exist unless the row is ``fresh``."""

    def __init__(self, row: Row, settings: Settings) -> None:
        self.row: Final = row
        self.settings: Final = settings
        self.rng: Final = random.Random(f"{settings.seed}-{row.name}")
        self.result: Final = RowResult(row.name, row.title)
        self.oracle: Final = settings.oracle(self.rng, row.lengths)
        self._service: ChaosService | None = None
        self._load: Load | None = None
        self._record: Final = settings.record(row.name)
        self._made: Final[list[ChaosService]] = []

    @property
    def service(self) -> ChaosService:
        assert self._service is not None, "this row makes its own services"
        return self._service

    @property
    def load(self) -> Load:
        assert self._load is not None, "this row makes its own load"
        return self._load

    def arguments(self, *more: str) -> tuple[str, ...]:
        times: tuple[str, ...] = ()
        if self.row.hang_s is not None:
            hang_s = self.row.hang_s * self.settings.patience
            times = ("--heartbeat-interval", f"{HEARTBEAT_S}", "--hang-timeout", f"{hang_s:g}")
        patience = ("--max-restarts", "1000000", "--restart-delay", "0.002")
        workers = ("--dp-size", str(self.settings.workers))
        engine = self.settings.engine(rate=self.row.rate)
        return (*engine, *times, *patience, *workers, *self._row_arguments(), *more)

    def _row_arguments(self) -> tuple[str, ...]:
        """The row's flags, without those of the fake engine when a model runs."""
        arguments = self.row.arguments
        if self.settings.model is None:
            return arguments
        pairs = zip(arguments, ("", *arguments), strict=False)
        return tuple(word for word, flag in pairs if FAKE_FLAGS not in flag + word)

    def new_service(self, *more: str, port: int | None = None) -> ChaosService:
        """Make a service with this row's flags; later flags win. ``port``: one to reuse."""
        service = ChaosService(self.arguments(*more), port=port or lasting_port())
        for name in self.row.orders:
            (service.orders / name).touch()
        self._made.append(service)
        return service

    def new_load(self, service: ChaosService) -> Load:
        return Load(service.client, self.oracle, self.result, streams=self.settings.streams)

    def throwaway(self) -> RowResult:
        """A result for clients whose service is killed: they may fail."""
        return RowResult(self.row.name, self.row.title)

    def workers(self) -> range:
        return range(self.settings.workers)

    async def run(self) -> RowResult:
        """Run all trials. An exception in a trial is a violation, and ends the row."""
        began_s = time.monotonic()
        broken = False
        try:
            await (self._run_fresh() if self.row.fresh else self._run_shared())
        except Exception as error:
            broken = True
            self.result.violate(f"the trial failed: {type(error).__name__}: {error}")
        finally:
            self._keep_violations()
        measured = {"detection": self.result.detection_s, "recovery": self.result.recovery_s}
        for (name, values_s), bound_s in zip(measured.items(), self.row.bounds_s, strict=True):
            # A row that failed before it measured anything has its violation already.
            if values_s or not broken:
                patience = self.settings.slack * self.settings.patience
                self.result.bound(name, values_s, patience * bound_s)
        self._keep_violations()
        self.result.seconds = time.monotonic() - began_s
        return self.result

    async def _run_fresh(self) -> None:
        for _ in range(self.settings.trials):
            self.result.trials += 1
            self._made.clear()
            await self.row.trial(self)
            self._keep_violations()

    def _keep_violations(self) -> None:
        log = [line for service in self._made for line in service.log_lines()]
        self._record.write(self.result.violations, log)

    async def _run_shared(self) -> None:
        service = self._service = self.new_service()
        try:
            await service.start()
            await self.oracle.prepare(service.client)
            self._load = self.new_load(service)
            await service.running()
            before = service.footprint()
            await self._run_trials(service, self._load)
            await look_at_rest(service, self.result, before)
            await self.end(service)
        finally:
            await service.stop()

    async def _run_trials(self, service: ChaosService, load: Load) -> None:
        # In a group one loss is the loss of all, although only one is named.
        group = "--enable-dp-attention" in self.row.arguments
        owners = 1 if group or not self.row.load else len(service.pids)
        bystanders = Bystanders(service, load, self.result, owners)
        try:
            if self.row.load:
                load.start()
                await bystanders.watch_calm()
            for _ in range(self.settings.trials):
                self.result.trials += 1
                bystanders.begin()
                await self.row.trial(self)
                await bystanders.end()
                self._keep_violations()
        except asyncio.CancelledError:
            load.abandon()
            raise
        finally:
            await load.stop()
        bystanders.judge(self.settings.slack)

    async def end(self, service: ChaosService) -> None:
        """Stop the service, and count its leftovers."""
        service.signal(STOP)
        status = await service.exited(QUIET_S)
        if status != 0:
            self.result.violate(f"exit status {status} after SIGTERM")
        await self.nothing_left(service)

    async def nothing_left(self, service: ChaosService, *, within_s: float = 2.0) -> None:
        """Count the workers of a service that is gone, and its sockets."""
        await look_after_end(service, self.result, within_s=within_s)


def stop_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: by ending its services first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
