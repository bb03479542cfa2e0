"""Actions that the supervisor asks for, and the losses that they follow from: values only."""

from dataclasses import dataclass
from typing import Final, Self

from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.events import Failed, FailureKind

BLAMELESS: Final = frozenset({LossKind.SIBLING, LossKind.RESTART})
"""The requests of such a worker are not suspect, and have not used up an attempt."""
STUCK: Final = frozenset({LossKind.HUNG, LossKind.SILENT})
"""The worker does not respond. In a lockstep group, all ranks look like this together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of one worker. ``failure``: the kind that it reported or that its exit status means.

    ``lost_rank``: the rank of its group that it reports as lost. ``sole``: all ranks of its group
    look stuck, and this is the one that the others wait for.
    """

    kind: LossKind
    detail: str
    failure: FailureKind | None = None
    lost_rank: int | None = None
    sole: bool = False

    @classmethod
    def from_report(cls, failed: Failed) -> Self:
        """Make the loss of a worker that reports its own failure."""
        return cls(
            kind=LossKind.EXIT,
            detail=failed.message,
            failure=failed.kind,
            lost_rank=failed.lost_rank,
        )

    @property
    def final(self) -> bool:
        """Whether a restart with the same configuration would fail again."""
        return self.failure is not None and not self.failure.transient


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process of worker ``index`` under a new identity."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class SendStart:
    """The worker said hello: tell it what to load."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class AddOwner:
    """The worker is ready: it becomes an owner."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class CloseOwner:
    """Send it no further request: it, or another rank of its group, is about to be lost."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class DrainOwner:
    """Send it no further request, and have it refuse those under way."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class RemoveOwner:
    """Drop its further events; its grants are lost. ``culprit``: the loss is its own fault."""

    index: int
    identity: str
    loss: Loss
    culprit: bool


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Ask it to exit. ``Kill`` follows if it does not."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have it write its stacks to the log and exit. ``Kill`` follows if it does not."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill its process group at once."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The worker has failed for good."""

    index: int
    loss: Loss


Action = (
    Spawn
    | SendStart
    | AddOwner
    | CloseOwner
    | DrainOwner
    | RemoveOwner
    | Dismiss
    | DumpStacks
    | Kill
    | GiveUp
)
