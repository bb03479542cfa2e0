"""Shows each worker's progress while the service starts: a live table on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlx_dp.orchestrator.api import OwnerState, WorkerStatus
from mlx_dp.proto.messages.events import WorkerPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerStage:
    """One owner's stage. ``detail``: its capacity, or why it failed."""

    owner: int
    stage: str
    detail: str = ""


class StartDisplay(Protocol):
    def show(self, owners: tuple[OwnerState, ...], elapsed_s: float) -> None:
        """Show the present states of all owners. Called often."""


def stage_of(state: OwnerState) -> OwnerStage:
    """Derive an owner's stage from its state."""
    match state.status:
        case WorkerStatus.READY:
            return OwnerStage(owner=state.dp_rank, stage="ready", detail=_capacity(state))
        case WorkerStatus.FAILED | WorkerStatus.LOST:
            return OwnerStage(owner=state.dp_rank, stage=state.status.value, detail=state.message)
        case WorkerStatus.STARTING:
            return OwnerStage(owner=state.dp_rank, stage=_starting(state))
        case WorkerStatus.DRAINING | WorkerStatus.STOPPED:
            return OwnerStage(owner=state.dp_rank, stage=state.status.value)


@contextmanager
def start_display(console: Console) -> Iterator[StartDisplay]:
    """Show the display that suits the console until the block ends."""
    if not console.is_terminal:
        # The log has a line for each event instead.
        yield NoDisplay()
        return
    with Live(console=console, transient=True, refresh_per_second=10) as live:
        yield LiveDisplay(live)


class NoDisplay:
    """Shows nothing."""

    def show(self, owners: tuple[OwnerState, ...], elapsed_s: float) -> None:
        pass


class LiveDisplay:
    """A live table with the seconds that each owner has taken."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._began_s: dict[int, float] = {}
        self._took_s: dict[int, float] = {}

    def show(self, owners: tuple[OwnerState, ...], elapsed_s: float) -> None:
        table = Table(box=None, pad_edge=False)
        for heading in ("owner", "stage", "seconds", ""):
            table.add_column(heading)
        for state in owners:
            now = stage_of(state)
            # As Text, so that square brackets are not read as markup.
            detail = Text(now.detail)
            table.add_row(str(now.owner), now.stage, self._seconds(now, elapsed_s), detail)
        self._live.update(table)

    def _seconds(self, now: OwnerStage, elapsed_s: float) -> str:
        if now.stage == "queued":
            self._began_s.pop(now.owner, None)
            return ""
        took_s = elapsed_s - self._began_s.setdefault(now.owner, elapsed_s)
        if now.stage == "ready":
            took_s = self._took_s.setdefault(now.owner, took_s)
        else:
            self._took_s.pop(now.owner, None)
        return f"{took_s:.1f}"


def _starting(state: OwnerState) -> str:
    if state.pid is None:
        return "queued"
    if state.phase == WorkerPhase.WARMING:
        return "warming"
    return "loading"


def _capacity(state: OwnerState) -> str:
    if state.capacity is None:
        return ""
    tokens = state.capacity.pool_tokens
    words = [f"{state.capacity.request_slots:,} slots"]
    if state.capacity.auxiliary_slots:
        words.append(f"{state.capacity.auxiliary_slots:,} auxiliary slots")
    if tokens is not None:
        words.append(f"{tokens:,} KV tokens")
    return ", ".join(words)
