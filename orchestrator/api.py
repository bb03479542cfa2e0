"""The interface of the control plane for HTTP: token ids in, token ids out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from mlx_dp.orchestrator.service_counters import ControllerCounters, RequestObserver
from mlx_dp.orchestrator.worker_states import WorkerState
from mlx_dp.orchestrator.worker_states import WorkerStatus as WorkerStatus
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.events import FinishReason, PassTotals, TokenLogprob
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.sampling_params import SamplingParams

RETRY_BUSY_S: Final = 1
"""Retry-After when the service is full: requests end all the time."""
RETRY_ABSENT_S: Final = 5
"""Retry-After when no owner is ready, or the requested one is not."""

CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
"""OpenAI's error code of a request that is too long."""


class ServiceStatus(StrEnum):
    """READY while at least one owner serves; under dp-attention, while all of them do.

    RESTARTING: no owner serves because of a requested restart. New requests wait in the queue.
    """

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


class OverloadedError(Exception):
    """Temporarily overloaded: the queue is full (429), or no owner is ready (503).

    It does not mean that the request is invalid. ``retry_after_s`` is advice to the client.
    """

    def __init__(self, message: str, *, status: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def queue_full_message(queued: int, limit: int) -> str:
    """Return the message of a refusal because the queue is full."""
    return f"the queue is full: {queued} of {limit} requests queued"


class RefusedError(Exception):
    """No owner could ever run this request (400). ``param`` names the field at fault."""

    def __init__(self, message: str, *, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sequence to generate. ``label``: the client's request id, for logs only."""

    prompt_ids: tuple[int, ...]
    max_tokens: int | None
    """None: the rest of the context, or of the owner's KV tokens if those are fewer. A larger value
    is clamped, unless ``strict_max_tokens`` is set."""
    stop_token_ids: tuple[int, ...]
    params: SamplingParams
    routed_dp_rank: int | None = None
    cache_salt: str = ""
    """Cached prefixes are shared only among requests with the same salt."""
    grammar: Grammar | None = None
    """The grammar of the output. HTTP has already checked it."""
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The request was granted to an owner. ``reason``: why the router chose it.

    It precedes all other events of that owner, and comes again for each further owner.
    """

    dp_rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The prompt was prefilled for the first time; ``cached_tokens`` of it were cached."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Further tokens: all that are available when the event is read.

    ``logprobs`` has one entry per token if requested. A stop token is included, as the last one.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event. ``message`` and ``code`` are set when ``reason`` is ERROR."""

    reason: FinishReason
    message: str = ""
    code: str = ""
    status: int = 500


StreamEvent = Granted | Started | NewTokens | Ended


class ResponseStream(Protocol):
    """The response stream of one request: its events in order, the last one ``Ended``."""

    @property
    def request_id(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    def cancel(self) -> None:
        """Cancel the request and free its slot. Idempotent, in every state."""

    def complete(self) -> None:
        """Like ``cancel``, but with STOP: the client has all that it requested."""


class FlushOutcome(StrEnum):
    """The outcome of a flush at one owner. NOT_READY: it has no prefixes yet."""

    FLUSHED = "flushed"
    TIMEOUT = "timeout"
    LOST = "lost"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerFlush:
    """The outcome of a flush at one owner, and what it freed."""

    dp_rank: int
    outcome: FlushOutcome
    num_tokens: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerState:
    """One owner, in the controller's view."""

    dp_rank: int
    status: WorkerStatus
    pid: int | None
    incarnation: str
    restarts: int
    capacity: OwnerCapacity | None
    shape: ModelShape | None
    context_length: int | None
    device: str
    running: int
    """Slots in use: by running requests, and by cancelled ones until the owner releases them."""
    prefilling: int
    used_tokens: int
    reserved_tokens: int
    auxiliary_used: int
    rss_nbytes: int
    device_nbytes: int
    prefix_tokens: int
    """Tokens of cached prefixes; their bytes follow."""
    prefix_nbytes: int
    held_nbytes: int
    """Bytes of rows, cached prefixes and states."""
    held_buffers: int
    """Device buffers of these and the weights."""
    buffer_limit: int | None
    """The limit of ``held_buffers``; None: unlimited, or not known yet."""
    step: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    generation_tokens_per_s: float
    phase: str
    message: str = ""
    restarting: bool = False
    """It is being replaced on request; requests that need this rank wait for its successor."""
    overdue: bool = False
    """It was silent, or made no progress, for longer than its step may take."""
    passes: PassTotals | None = None
    """Forward passes of its present process, as a rank of a group."""
    batching: Batching | None = None
    """The form of its model's batch; None: not known yet, or there is no model."""

    @property
    def budget_nbytes(self) -> int | None:
        """The limit of ``held_nbytes``; None: unbounded, or not known yet."""
        return None if self.capacity is None else self.capacity.cache_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """The state that the metadata routes show, made without asking the workers."""

    status: ServiceStatus
    mode: ReplicaMode
    load_balance_method: str
    tp_size: int
    queued_requests: int
    queued_tokens: int
    max_queued_requests: int
    owners: tuple[OwnerState, ...]

    @property
    def num_open_requests(self) -> int:
        """Requests that are queued or have a slot."""
        return self.queued_requests + sum(owner.running for owner in self.owners)


class Service(Protocol):
    """The control plane as HTTP sees it. Call it only from the event loop."""

    def state(self) -> ServiceState: ...

    def limits(self) -> AdmissionLimits | None:
        """Return the limits of the largest owner; None before any was ready."""

    def submit(self, generation: Generation) -> ResponseStream:
        """Queue a request and return its response stream.

        Raises OverloadedError or RefusedError; then nothing was queued.
        """

    async def flush_cache(self, timeout_s: float) -> tuple[OwnerFlush, ...]:
        """Make every ready owner drop its cached prefixes; return one result per owner."""

    def workers(self) -> tuple[WorkerState, ...]:
        """One state per worker process, in the order of their indices."""

    def restart_worker(self, index: int) -> tuple[int, ...]:
        """Replace a worker, or its whole group, without failing a request.

        Returns the affected workers at once. Raises RestartRefusedError; then nothing was changed.
        """

    def counters(self) -> ControllerCounters:
        """Totals since the start, for metrics."""

    def observe(self, observer: RequestObserver) -> None:
        """Report request timings to this observer from now on."""
