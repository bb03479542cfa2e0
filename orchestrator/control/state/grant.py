"""Grants: the slot and the tokens that a request holds at an owner."""

from dataclasses import dataclass

from mlx_dp.proto.capacity.request_limits import next_tokens


@dataclass(slots=True, eq=False)
class Grant:
    """One slot of an owner, held by one epoch of one request until the owner gives it back.

    It outlives a cancelled request, since the slot is free only once the owner confirms. ``since``
    is the time of the grant, or of its abort; ``heartbeats_before`` is how many heartbeats of the
    owner had arrived by then.
    """

    request_id: int
    epoch: int
    held_tokens: int
    """Tokens that the request has there: prompt and output so far."""
    remaining_tokens: int
    """Output tokens that are still to come."""
    unprefilled_tokens: int
    """Tokens to compute before the next output token; 0 once ``prefilled``."""
    since: float
    heartbeats_before: int
    suspect: bool = False
    """A worker crashed while it ran this request."""
    accepted: bool = False
    prefilled: bool = False
    made_progress: bool = False
    """The owner has sent tokens for this grant."""
    abort_sent: bool = False
    withdrawn: bool = False
    """The request was requeued without waiting for the owner, which may not know it yet."""

    @property
    def is_sole_suspect(self) -> bool:
        """Whether the next crash of the owner would be blamed on this request alone."""
        return self.suspect and not self.made_progress

    @property
    def reserved_tokens(self) -> int:
        """Tokens set aside for the request; they grow with its output."""
        return next_tokens(self.held_tokens, self.remaining_tokens)
