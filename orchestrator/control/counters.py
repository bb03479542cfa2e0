"""What the controller counts, and what it tells of each request."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from mlx_dp.orchestrator.control.supervisor_steps import LossKind
from mlx_dp.proto.messages import FinishReason

REFUSAL_REASONS: Final = (
    "queue_full",
    "starting",
    "draining",
    "dead",
    "rank_not_ready",
    "invalid",
)
ERROR_CODES: Final = (
    "engine_error",
    "no_worker",
    "queue_timeout",
    "rejected_invalid",
    "rejected_too_long",
    "request_crashed_worker",
    "request_timeout",
    "shutting_down",
    "worker_aborted",
    "worker_failed",
    "worker_lost",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """One request, told once, when its answer ended. Times are seconds from its arrival.

    A time is None when the request never came that far. ``owner`` is the last one that had it.
    """

    reason: FinishReason
    code: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    owner: int | None
    granted_s: float | None
    """When it was first granted: its time in the queue."""
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between tokens, for answers of at least two."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class RequestObserver(Protocol):
    """Whoever keeps histograms. Called from the event loop, so it must be quick."""

    def started(self, queued_s: float) -> None:
        """An owner has a request's prompt, which had waited so long for its grant."""

    def first_token(self, waited_s: float) -> None:
        """A request's first token came, so long after its arrival."""

    def next_tokens(self, gap_s: float) -> None:
        """Further tokens of a request came, so long after those before."""

    def ended(self, timings: RequestTimings) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerCounters:
    """Totals since the start; none of them ever falls.

    ``requests_started`` is the sum of ``ok``, ``error``, ``aborted`` and the requests now in hand.
    """

    requests_started: int
    requests_ok: int
    requests_error: int
    requests_aborted: int
    requests_refused: Mapping[str, int]
    """Never queued, by one of ``REFUSAL_REASONS``."""
    errors: Mapping[str, int]
    """Requests that ended with an error, by one of ``ERROR_CODES``."""
    requests_replayed: int
    grants_withdrawn: int
    """Grants that were not accepted in time, and taken back."""
    requests_preempted: int
    """Times that an owner gave a request up because its memory ran short."""
    grants: Mapping[str, int]
    """Requests given to an owner, by the router's reason; replays count again."""
    prompt_tokens: int
    """Of requests when an owner has first prefilled them."""
    cached_tokens: int
    generated_tokens: int
    worker_deaths: int
    worker_restarts: int
    worker_losses: Mapping[str, int]
    """Workers that were given up, by how; those of ``restart`` are no deaths."""
    protocol_errors: int
    """Messages that cost a worker its life: malformed, or such as could not be."""
    malformed_frames: int
    """Those of them that were no message at all."""
    stale_facts: int
    """Facts about requests that have ended or moved on, which were dropped."""
    duplicate_chunks: int
    """Tokens that had arrived before, which were dropped."""
    unknown_frames: int
    """Frames of peers that nobody expects to hear, which were dropped."""


@dataclass(slots=True)
class Tally:
    """The controller's own running totals, of which ``ControllerCounters`` is a snapshot."""

    requests_started: int = 0
    requests_ok: int = 0
    requests_error: int = 0
    requests_aborted: int = 0
    requests_replayed: int = 0
    grants_withdrawn: int = 0
    worker_deaths: int = 0
    worker_restarts: int = 0
    protocol_errors: int = 0
    malformed_frames: int = 0
    stale_facts: int = 0
    duplicate_chunks: int = 0
    prompt_by_owner: Counter[int] = field(default_factory=Counter)
    cached_by_owner: Counter[int] = field(default_factory=Counter)
    generated_by_owner: Counter[int] = field(default_factory=Counter)
    preempted_by_owner: Counter[int] = field(default_factory=Counter)
    requests_refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    grants: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)

    def worker_lost(self, kind: LossKind) -> None:
        self.losses[kind.value] += 1
        self.worker_deaths += kind is not LossKind.RESTART

    def ended(self, reason: FinishReason, code: str) -> None:
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self.requests_ok += 1
            case FinishReason.ABORT:
                self.requests_aborted += 1
            case FinishReason.ERROR:
                self.requests_error += 1
                self.errors[code] += 1

    def snapshot(self, *, unknown_frames: int) -> ControllerCounters:
        return ControllerCounters(
            requests_started=self.requests_started,
            requests_ok=self.requests_ok,
            requests_error=self.requests_error,
            requests_aborted=self.requests_aborted,
            requests_refused=MappingProxyType(dict(self.requests_refused)),
            errors=MappingProxyType(dict(self.errors)),
            requests_replayed=self.requests_replayed,
            grants_withdrawn=self.grants_withdrawn,
            requests_preempted=self.preempted_by_owner.total(),
            grants=MappingProxyType(dict(self.grants)),
            prompt_tokens=self.prompt_by_owner.total(),
            cached_tokens=self.cached_by_owner.total(),
            generated_tokens=self.generated_by_owner.total(),
            worker_deaths=self.worker_deaths,
            worker_restarts=self.worker_restarts,
            worker_losses=MappingProxyType(dict(self.losses)),
            protocol_errors=self.protocol_errors,
            malformed_frames=self.malformed_frames,
            stale_facts=self.stale_facts,
            duplicate_chunks=self.duplicate_chunks,
            unknown_frames=unknown_frames,
        )
