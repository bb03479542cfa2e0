"""One request as the control plane sees it."""

from dataclasses import dataclass, field
from enum import StrEnum

from mlx_dp.orchestrator.api import Generation


class RequestStatus(StrEnum):
    """The states of a request. GRANTED: sent to an owner, which has not accepted it yet."""

    QUEUED = "queued"
    GRANTED = "granted"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestEntry:
    """One request.

    Invariants: ``dp_rank`` is set exactly while GRANTED or RUNNING; ``epoch`` grows by one with
    every grant and never otherwise; ``emitted`` only grows, and only while RUNNING.
    """

    request_id: int
    generation: Generation
    queued_at: float
    status: RequestStatus = RequestStatus.QUEUED
    epoch: int = 0
    dp_rank: int | None = None
    """The rank of the owner that holds its grant."""
    max_tokens: int | None = None
    """None until the first grant if the client set no maximum, or one that every owner clamps."""
    emitted: list[int] = field(default_factory=list)
    losses_without_progress: int = 0
    """Consecutive losses of owners that ran the request, since its last token."""
    losses_before_accept: int = 0
    """Consecutive losses of owners that had not accepted the request, since its last token."""
    crashes: int = 0
    """Workers that crashed, by their own fault, while they ran the request."""
    last_dp_rank: int | None = None
    """The rank of the last owner that it was granted to."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the first owner to prefill it had cached; None before that."""
    granted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that a worker has to prefill for the request."""
        return len(self.generation.prompt_ids) + len(self.emitted)

    @property
    def pinned(self) -> int | None:
        """The only rank that may run it, or None. An explicit rank holds until the first token."""
        return None if self.emitted else self.generation.routed_dp_rank
