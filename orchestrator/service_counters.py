"""Counters of the control plane and timings of requests: values for HTTP and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from mlx_dp.proto.messages.events import FinishReason

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
    """One request, reported once, when it has ended. Times are seconds from its arrival.

    A time is None when the request never came that far. ``dp_rank`` is the last owner that ran it.
    """

    reason: FinishReason
    code: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    dp_rank: int | None
    granted_s: float | None
    """When the request was first granted: its time in the queue."""
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between tokens, for answers of at least two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class RequestObserver(Protocol):
    """Receives the times of requests, for histograms. Called in the event loop: must be quick."""

    def started(self, queued_s: float) -> None:
        """A request was prefilled. ``queued_s``: how long it waited for its grant."""

    def first_token(self, waited_s: float) -> None:
        """The first token has arrived. ``waited_s``: the time since the request arrived."""

    def next_tokens(self, gap_s: float) -> None:
        """Further tokens have arrived. ``gap_s``: the time since the previous tokens."""

    def ended(self, timings: RequestTimings) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerCounters:
    """Totals since the start; none of them ever decreases.

    ``requests_started`` is the sum of ``ok``, ``error``, ``aborted`` and the open requests.
    """

    requests_started: int
    requests_ok: int
    requests_error: int
    requests_aborted: int
    requests_refused: Mapping[str, int]
    """Requests that were never queued, by one of ``REFUSAL_REASONS``."""
    errors: Mapping[str, int]
    """Requests that ended with an error, by one of ``ERROR_CODES``."""
    requests_replayed: int
    grants_withdrawn: int
    """Grants that were not accepted in time, and withdrawn."""
    requests_preempted: int
    """How often an owner gave a request back because its memory ran short."""
    grants: Mapping[str, int]
    """Grants by the reason of the router; replays count again."""
    prompt_tokens: int
    """Prompt tokens of requests, counted when an owner has first prefilled them."""
    cached_tokens: int
    generated_tokens: int
    worker_deaths: int
    worker_restarts: int
    worker_losses: Mapping[str, int]
    """Worker losses by kind; those of kind ``restart`` are no deaths."""
    protocol_errors: int
    """Messages for which a worker was replaced: malformed, or against the protocol."""
    malformed_frames: int
    """Protocol errors that were no message at all."""
    stale_events: int
    """Events about requests that have ended or moved on, which were dropped."""
    duplicate_chunks: int
    """Chunks of tokens that had arrived before, which were dropped."""
    unknown_frames: int
    """Frames of unexpected peers, which were dropped."""
