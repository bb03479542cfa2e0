"""What the supervisor asks to be done, and why workers are lost: values only."""

from dataclasses import dataclass
from typing import Final, Self

from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages import Failed, FailureKind

BLAMELESS: Final = frozenset({LossKind.SIBLING, LossKind.RESTART})
"""What a worker had in hand is not under suspicion either, and has not used up an attempt."""
STUCK: Final = frozenset({LossKind.HUNG, LossKind.SILENT})
"""It cannot say what it does. In a group that waits for each other, all of them look so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One worker's end. ``failure`` is what it said itself, or its exit status means.

    ``lost_rank``: the rank of its group that it says it has lost. ``sole``: of a group in which
    all look stuck, it is this one that the others wait for.
    """

    kind: LossKind
    detail: str
    failure: FailureKind | None = None
    lost_rank: int | None = None
    sole: bool = False

    @classmethod
    def told(cls, fact: Failed) -> Self:
        """What a worker says of its own end."""
        return cls(
            kind=LossKind.EXIT, detail=fact.message, failure=fact.kind, lost_rank=fact.lost_rank
        )

    @property
    def final(self) -> bool:
        """A restart with the same configuration would fail again."""
        return self.failure is not None and not self.failure.transient


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process of worker ``index`` under a new identity."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class SendStart:
    """It said hello: tell it what to load."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class AddOwner:
    """It is ready: give it requests."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class CloseOwner:
    """Give it nothing more for now: it, or another of its group, is about to be lost."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class DrainOwner:
    """Give it nothing more, and have it take nothing more."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class RemoveOwner:
    """Hear it no more; what it was granted is lost. ``culprit``: the loss is its own fault."""

    index: int
    identity: str
    loss: Loss
    culprit: bool


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Have it exit by itself. ``Kill`` follows if it does not."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have it write its stacks to the log and die. ``Kill`` follows if it does not."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End its process group at once."""

    index: int
    identity: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This worker stays down."""

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
