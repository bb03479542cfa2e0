"""Events: messages of a worker to its controller, ``Up`` in all, and the values in them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from mlx_dp.proto.capacity.model_shape import Count, ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.parallel import Rank
from mlx_dp.proto.fields import (
    MAX_REQUEST_TOKENS,
    Epoch,
    RequestId,
    Seconds,
    Text,
    TokenId,
    TokenIds,
)
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.sampling_params import MAX_TOP_LOGPROBS, require_finite


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class WorkerPhase(StrEnum):
    """The phase of a worker's start, as the worker reports it."""

    FORMING = "forming"
    """It joins the other ranks of its group, and waits until all have joined."""
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"


class FailureKind(StrEnum):
    """The reason of a worker's failure. Only ``transient`` kinds are retried."""

    CONFIG = "config"
    UNSUPPORTED_MODEL = "unsupported_model"
    OUT_OF_MEMORY = "out_of_memory"
    PEER_LOST = "peer_lost"
    """Another rank of its group is lost or silent; this worker is not at fault."""
    INTERNAL = "internal"

    @property
    def transient(self) -> bool:
        """Whether a restart with the same configuration may help."""
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
    """Worker to controller: the model is loaded and warmed up, and the worker can serve."""

    tag: ClassVar[str] = "ready"

    capacity: OwnerCapacity
    shape: ModelShape
    context_length: Annotated[int, Meta(ge=1, lt=2**31)]
    """The limit for requests: the model's, or a smaller one from the configuration."""
    device: Text
    load_s: Seconds
    batching: Batching | None = None
    """None: the engine has no model."""
    unbatched_reason: Text = ""
    """Why requests run one by one, if they do."""
    buffer_limit: Count | None = None
    """The number of buffers that the device allows; None: limited only by memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Worker to controller: the request holds this slot from now on."""

    tag: ClassVar[str] = "accepted"

    request_id: RequestId
    epoch: Epoch
    slot: Annotated[int, Meta(ge=0, lt=2**20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Worker to controller: the request was rejected, and holds nothing here."""

    tag: ClassVar[str] = "rejected"

    request_id: RequestId
    epoch: Epoch
    reason: RejectReason
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Worker to controller: the prefill is complete; ``cached_tokens`` were not computed.

    Sent once per grant, before its first ``Tokens``.
    """

    tag: ClassVar[str] = "prefilled"

    request_id: RequestId
    epoch: Epoch
    cached_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a drawn token, and the best ``(token id, log-probability)`` pairs."""

    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()

    def __post_init__(self) -> None:
        require_finite(self.logprob, *(logprob for _, logprob in self.top))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request; ``index`` is the answer position of the first of them."""

    request_id: RequestId
    epoch: Epoch
    index: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    ids: Annotated[TokenIds, Meta(min_length=1)]
    logprobs: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_REQUEST_TOKENS)] = ()
    """One per id if the request asked for them, else empty."""

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} tokens with {len(self.logprobs)} log-probabilities")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Worker to controller: the new tokens of one step, for all its requests."""

    tag: ClassVar[str] = "tokens"

    chunks: Annotated[tuple[TokenChunk, ...], Meta(max_length=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Worker to controller: memory was short, so the request was preempted, and its slot is free.

    The request is valid: it continues elsewhere, or here later. ``num_tokens`` counts the whole
    answer so far, as in ``Finished``.
    """

    tag: ClassVar[str] = "preempted"

    request_id: RequestId
    epoch: Epoch
    num_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """Worker to controller: the tokens and bytes that a ``Flush`` has freed."""

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
class PassTotals:
    """Counts of one process since it began to serve.

    ``waited_s`` is the time that it waited for a peer to enter a pass; its device may still have
    run the previous pass meanwhile.
    """

    passes: Count
    idle_passes: Count
    """Passes in which it had no rows."""
    waited_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Worker to controller: the loop runs. ``step`` must advance while ``running`` is above 0."""

    tag: ClassVar[str] = "heartbeat"

    phase: WorkerPhase
    step: Count
    running: Count
    """Requests that hold a slot."""
    prefilling: Count
    """Running requests without a token yet."""
    used_tokens: Count
    """KV tokens that hold content."""
    reserved_tokens: Count
    """KV tokens set aside for running requests."""
    auxiliary_used: Count
    """Auxiliary slots of running requests and of cached prefixes."""
    rss_nbytes: Count
    device_nbytes: Count
    cached_tokens: Count = 0
    """Tokens of cached prefixes. All but those in use can be evicted."""
    cached_nbytes: Count = 0
    held_nbytes: Count = 0
    """Bytes of rows, cached prefixes and states, out of ``OwnerCapacity.cache_nbytes``."""
    held_buffers: Count = 0
    """Buffers of rows, cached prefixes, states and weights."""
    step_tokens: Count = 0
    """Prompt tokens in the steps under way. The next heartbeat may come only after them."""
    prefill_token_s: Annotated[float, Meta(ge=0.0)] | None = None
    """Upper estimate of the seconds of one prompt token; None: not measured yet."""
    malformed_frames: Count = 0
    """Frames from the controller that it dropped as malformed."""
    awaits_rank: Rank | None = None
    """The rank of its group that it waits for, so ``step`` does not advance; None: it does not
    wait.
    """
    passes: PassTotals | None = None
    """None: the worker is not part of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Worker to controller: the worker cannot continue, and exits now."""

    tag: ClassVar[str] = "failed"

    kind: FailureKind
    message: Text
    lost_rank: Rank | None = None
    """With PEER_LOST, the lost rank, if it is known."""


Up = (
    Hello
    | Ready
    | Accepted
    | Rejected
    | Prefilled
    | Tokens
    | Preempted
    | Finished
    | Flushed
    | Heartbeat
    | Failed
)
"""Every event. The codec decodes these and no others."""
