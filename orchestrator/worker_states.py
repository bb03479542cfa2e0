"""What the supervisor tells of its workers, and of what it was asked to do with them."""

from dataclasses import dataclass
from enum import StrEnum

from mlx_dp.proto.batching import Batching


class WorkerStatus(StrEnum):
    """A worker's life as the controller sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"


class LossKind(StrEnum):
    """How a worker was lost. Only EXIT tells of a process that is gone already."""

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
    """A restart that was asked for cannot begin now; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker across its incarnations. ``epoch``: how often its group was started anew."""

    index: int
    status: WorkerStatus
    status_s: float
    """How long it has had this status."""
    phase: str
    """What it is doing, as it says itself."""
    pid: int | None
    incarnation: str
    epoch: int
    restarts: int
    restarts_in_window: int
    """Those that count against the budget at present, of ``max_restarts``."""
    max_restarts: int
    last_cause: str
    """Why it was last given up, or empty when it never was."""
    restart_asked: bool
    """A restart that was asked for is still to come, or under way."""
    malformed_frames: int
    """Frames of ours that its present incarnation could not read."""
    host: str | None = ""
    """The machine it has a place on: "" is the controller's, None is none at present."""
    batching: Batching | None = None
    """The form of its model's batch; None: not known yet, or there is no model."""
    unbatched_reason: str = ""
    """Why its requests run one by one, where they do."""
