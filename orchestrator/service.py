"""The seam between HTTP and the control plane: token ids in, token ids out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from mlx_dp.orchestrator.control.counters import ControllerCounters, RequestObserver
from mlx_dp.orchestrator.worker_states import WorkerState
from mlx_dp.orchestrator.worker_states import WorkerStatus as WorkerStatus
from mlx_dp.proto.admission import AdmissionLimits
from mlx_dp.proto.batching import Batching
from mlx_dp.proto.grammar import Grammar
from mlx_dp.proto.messages import FinishReason, TokenLogprob
from mlx_dp.proto.model_shape import ModelShape
from mlx_dp.proto.ownership import OwnerCapacity
from mlx_dp.proto.parallel import ReplicaMode
from mlx_dp.proto.pass_totals import PassTotals
from mlx_dp.proto.sampling_params import SamplingParams

RETRY_BUSY_S: Final = 1
"""When to come back to a service that is full: a request ends every moment."""
RETRY_ABSENT_S: Final = 5
"""When to come back to one where nobody is ready, or the owner that is asked for is not."""

CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
"""OpenAI's code of a request that is too long, by which clients know it."""


class ServiceStatus(StrEnum):
    """READY while at least one owner is loaded and serves; under dp-attention, while all do.

    RESTARTING: nobody does for the moment, on request. What is new is taken, and waits.
    """

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


class OverloadedError(Exception):
    """Not now: the queue is full (429), or nobody is ready to serve (503).

    It does not mean that the request is wrong. ``retry_after_s`` is advice to the client.
    """

    def __init__(self, message: str, *, status: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """Never: no owner could ever run this request (400). ``param`` names the field at fault."""

    def __init__(self, message: str, *, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer to generate. ``label`` is the client's request id, for logs only."""

    prompt_ids: tuple[int, ...]
    max_tokens: int | None
    """None: what is left of the context, or of the owner's tokens if that is less. More than is
    left means the same, unless the service is strict about it."""
    stop_token_ids: tuple[int, ...]
    params: SamplingParams
    routed_dp_rank: int | None = None
    cache_salt: str = ""
    """Cached prefixes are shared only among answers of the same salt."""
    grammar: Grammar | None = None
    """What the answer must match. It compiles: nothing behind this checks it for the client."""
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The request went to an owner. ``reason`` says why to this one.

    It comes before the owner has said anything, and again whenever the request moves.
    """

    owner: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The whole prompt is in, for the first time. ``cached_tokens`` of it were there already."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Further tokens of the answer: all that are at hand when it is read.

    ``logprobs`` has one entry a token when asked for. A token that stopped the answer is the last.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event of an answer. ``message`` and ``code`` are set when it is an ERROR."""

    reason: FinishReason
    message: str = ""
    code: str = ""
    status: int = 500


AnswerEvent = Granted | Started | NewTokens | Ended


class Answer(Protocol):
    """The events of one request, in order, closed by exactly one ``Ended``."""

    @property
    def request_id(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[AnswerEvent]: ...

    def cancel(self) -> None:
        """Say that nobody wants the rest. Idempotent, in every state; the slot is freed."""

    def complete(self) -> None:
        """Like ``cancel``, but the client has all it asked for: the answer ends as STOP."""


class FlushOutcome(StrEnum):
    """What became of a flush at one owner. NOT_READY: it has no prefixes yet."""

    FLUSHED = "flushed"
    TIMEOUT = "timeout"
    LOST = "lost"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerFlush:
    """What a flush has freed at one owner."""

    owner: int
    outcome: FlushOutcome
    num_tokens: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerState:
    """One owner, as the controller's books have it at this moment."""

    owner: int
    status: WorkerStatus
    pid: int | None
    incarnation: str
    restarts: int
    capacity: OwnerCapacity | None
    shape: ModelShape | None
    context_length: int | None
    device: str
    running: int
    """Slots it holds for us: requests that run, and cancelled ones until it lets go of them."""
    prefilling: int
    used_tokens: int
    reserved_tokens: int
    auxiliary_used: int
    rss_nbytes: int
    device_nbytes: int
    prefix_tokens: int
    """Tokens of cached prefixes, and the bytes that they take."""
    prefix_nbytes: int
    held_nbytes: int
    """What rows, cached prefixes and states take."""
    held_buffers: int
    """Buffers on its device that these and the weights are made of."""
    buffer_limit: int | None
    """What ``held_buffers`` may come to; None: its device counts none, or it is not known yet."""
    step: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    generation_tokens_per_s: float
    phase: str
    message: str = ""
    restarting: bool = False
    """It is being replaced on request: what may only go there waits for its successor."""
    overdue: bool = False
    """It is silent, or makes no progress, for longer than its step may take."""
    passes: PassTotals | None = None
    """Of its present process, as a rank of a group."""
    batching: Batching | None = None
    """The form of its model's batch; None: not known yet, or there is no model."""

    @property
    def budget_nbytes(self) -> int | None:
        """What ``held_nbytes`` may come to; None: unbounded, or not known yet."""
        return None if self.capacity is None else self.capacity.cache_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """All that the metadata routes show. Made from values at hand, at no cost to a worker."""

    status: ServiceStatus
    mode: ReplicaMode
    load_balance_method: str
    tp_size: int
    queued_requests: int
    queued_tokens: int
    max_queued_requests: int
    owners: tuple[OwnerState, ...]

    @property
    def in_hand(self) -> int:
        """Requests that are queued or have a slot."""
        return self.queued_requests + sum(owner.running for owner in self.owners)


class Service(Protocol):
    """What the HTTP side may ask of the control plane. All calls are from the event loop."""

    def state(self) -> ServiceState: ...

    def limits(self) -> AdmissionLimits | None:
        """Bounds of the roomiest owner, ready or expected back; None while none was ever ready."""

    def submit(self, generation: Generation) -> Answer:
        """Queue a request and return its answer.

        Raises OverloadedError or RefusedError; then nothing was queued.
        """

    async def flush_cache(self, timeout_s: float) -> tuple[OwnerFlush, ...]:
        """Have every ready owner drop its cached prefixes, and return one result an owner."""

    def workers(self) -> tuple[WorkerState, ...]:
        """One state per worker process, in the order of their indices."""

    def restart_worker(self, index: int) -> tuple[int, ...]:
        """Have a worker, or its whole group, replaced without a request failing for it.

        Returns at once whom it concerns. Raises RestartRefusedError; then nothing was changed.
        """

    def counters(self) -> ControllerCounters:
        """Totals since the start, for metrics."""

    def observe(self, observer: RequestObserver) -> None:
        """Tell this observer of what happens to requests from now on."""
