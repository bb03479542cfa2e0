"""States of workers, as the supervisor reports them."""

from dataclasses import dataclass
from enum import StrEnum

from mlx_dp.proto.messages.batching import Batching


class WorkerStatus(StrEnum):
    """A worker's status in the controller's view."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"


class LossKind(StrEnum):
    """How a worker was lost. Only EXIT means that its process is already gone."""

    EXIT = "exit"
    HUNG = "hung"
    SILENT = "silent"
    PROTOCOL = "protocol"
    NOT_ACCEPTED = "not_accepted"
    NOT_RELEASED = "not_released"
    START_TIMEOUT = "start_timeout"
    DISCONNECTED = "disconnected"
    SIBLING = "sibling"
    """Another member of its group was lost; it did nothing wrong."""
    RESTART = "restart"
    """It was replaced on request; it did nothing wrong."""


class RestartRefusedError(Exception):
    """A requested restart cannot begin now; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker across its incarnations. ``epoch`` counts the starts of its group."""

    index: int
    status: WorkerStatus
    status_s: float
    """Time in this status."""
    phase: str
    """The phase that it reports."""
    pid: int | None
    incarnation: str
    epoch: int
    restarts: int
    restarts_in_window: int
    """Restarts that count against ``max_restarts`` at present."""
    max_restarts: int
    last_cause: str
    """Why it was last given up; empty if it never was."""
    restart_asked: bool
    """A requested restart is pending or under way."""
    malformed_frames: int
    """Frames from the controller that its present incarnation could not read."""
    host: str | None = ""
    """Its machine: "" is the controller's, None is a remote rank without a host."""
    batching: Batching | None = None
    """The form of its model's batch; None: not known yet, or no model."""
    unbatched_reason: str = ""
    """Why its requests run unbatched, if they do."""
