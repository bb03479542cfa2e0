"""Events: messages of a worker to its controller. See ``messages``."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from mlx_dp.proto.capacity.model_shape import Count, ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.parallel import Rank
from mlx_dp.proto.fields import MAX_REQUEST_TOKENS, Epoch, RequestId, Seconds, Text
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.pass_totals import PassTotals
from mlx_dp.proto.messages.token_chunk import TokenChunk


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class WorkerPhase(StrEnum):
    """The phase of a worker's start, as the worker reports it."""

    FORMING = "forming"
    """It meets the other ranks of its group, and cannot go on without them."""
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"


class FailureKind(StrEnum):
    """Why a worker gives up. Kinds that are not ``transient`` would fail again: no retry."""

    CONFIG = "config"
    UNSUPPORTED_MODEL = "unsupported_model"
    OUT_OF_MEMORY = "out_of_memory"
    PEER_LOST = "peer_lost"
    """Another rank of its group is gone or silent; itself it did nothing wrong."""
    INTERNAL = "internal"

    @property
    def transient(self) -> bool:
        """A restart with the same configuration may help."""
        return self in (FailureKind.PEER_LOST, FailureKind.INTERNAL)


class RejectReason(StrEnum):
    NO_SLOT = "no_slot"
    NO_TOKENS = "no_tokens"
    TOO_LONG = "too_long"
    INVALID = "invalid"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Worker to controller: this process is up and waits for ``Start``."""

    tag: ClassVar[str] = "hello"

    pid: Annotated[int, Meta(ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Worker to controller: loaded, warmed up on its real path, and able to serve."""

    tag: ClassVar[str] = "ready"

    capacity: OwnerCapacity
    shape: ModelShape
    context_length: Annotated[int, Meta(ge=1, lt=2**31)]
    """The limit that holds for requests: the model's, or a smaller one that was asked for."""
    device: Text
    load_s: Seconds
    batching: Batching | None = None
    """None: the engine has no model."""
    unbatched_reason: Text = ""
    """Why requests run one by one, where they do."""
    buffer_limit: Count | None = None
    """How many buffers its device lets it hold; None: as many as there is memory for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Worker to controller: the request holds this slot from now on."""

    tag: ClassVar[str] = "accepted"

    request_id: RequestId
    epoch: Epoch
    slot: Annotated[int, Meta(ge=0, lt=2**20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Worker to controller: the request was not taken, and holds nothing here."""

    tag: ClassVar[str] = "rejected"

    request_id: RequestId
    epoch: Epoch
    reason: RejectReason
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Worker to controller: the prompt is complete, ``cached_tokens`` of it without computing.

    Sent once per grant, before its first ``Tokens``.
    """

    tag: ClassVar[str] = "prefilled"

    request_id: RequestId
    epoch: Epoch
    cached_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Worker to controller: the new tokens of one step, for all its requests."""

    tag: ClassVar[str] = "tokens"

    chunks: Annotated[tuple[TokenChunk, ...], Meta(max_length=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Worker to controller: memory ran short, so the request was given up, and its slot is free.

    The request is sound: it continues elsewhere, or here later. ``num_tokens`` counts the whole
    answer so far, as in ``Finished``.
    """

    tag: ClassVar[str] = "preempted"

    request_id: RequestId
    epoch: Epoch
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """Worker to controller: how much a ``Flush`` has freed."""

    tag: ClassVar[str] = "flushed"

    flush_id: RequestId
    num_tokens: Count
    nbytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Worker to controller: the request ended, and its slot is free.

    ``num_tokens`` counts the whole answer, so that a lost frame is noticed.
    """

    tag: ClassVar[str] = "finished"

    request_id: RequestId
    epoch: Epoch
    reason: FinishReason
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    message: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Worker to controller: the loop turns. ``step`` must move while ``running`` is above 0."""

    tag: ClassVar[str] = "heartbeat"

    phase: WorkerPhase
    step: Count
    running: Count
    """Requests that hold a slot."""
    prefilling: Count
    """Those of them that have no token yet."""
    used_tokens: Count
    """KV tokens that hold content."""
    reserved_tokens: Count
    """KV tokens set aside for the requests that run."""
    auxiliary_used: Count
    """Auxiliary slots of running requests and of cached prefixes."""
    rss_nbytes: Count
    device_nbytes: Count
    cached_tokens: Count = 0
    """Tokens of cached prefixes, all of which can be dropped but for those in use."""
    cached_nbytes: Count = 0
    held_nbytes: Count = 0
    """What rows, cached prefixes and states take of ``OwnerCapacity.cache_nbytes``."""
    held_buffers: Count = 0
    """Buffers that these and the weights are made of."""
    step_tokens: Count = 0
    """Prompt tokens in the steps under way: no beat leaves until those are through."""
    prefill_token_s: Annotated[float, Meta(ge=0.0)] | None = None
    """Seconds of one prompt token in its recent steps, the slow ones; None: none measured yet."""
    malformed_frames: Count = 0
    """Frames of ours that it could not read, and has dropped."""
    awaits_rank: Rank | None = None
    """A rank of its group that it cannot go on without, or None: ``step`` stands for that one."""
    passes: PassTotals | None = None
    """None: it computes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Worker to controller: it cannot continue, and exits right after this."""

    tag: ClassVar[str] = "failed"

    kind: FailureKind
    message: Text
    lost_rank: Rank | None = None
    """With PEER_LOST, whom it waited for in vain, if it knows."""
