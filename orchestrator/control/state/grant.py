"""What one request holds at one owner."""

from dataclasses import dataclass

from mlx_dp.proto.capacity.request_limits import next_tokens


@dataclass(slots=True, eq=False)
class Grant:
    """One slot of an owner, held by one epoch of one request until the owner gives it back.

    It outlives a request that was cancelled, since the slot is free only once the owner says so.
    ``beats`` is the owner's count of heartbeats at the grant, or at the abort.
    """

    request_id: int
    epoch: int
    held: int
    """Tokens that the request has there: prompt and answer so far."""
    left: int
    """Tokens of the answer that are still to come."""
    unfilled: int
    """Tokens to compute before the first token of the answer; 0 once ``prefilled``."""
    since: float
    beats: int
    suspect: bool = False
    """A worker crashed while it ran this request."""
    accepted: bool = False
    prefilled: bool = False
    made_progress: bool = False
    """The owner has sent tokens for this grant."""
    abort_sent: bool = False
    withdrawn: bool = False
    """The request has moved on without waiting for the owner, which may not know that yet."""

    @property
    def on_trial(self) -> bool:
        """Whether the next crash of the owner would be blamed on this request alone."""
        return self.suspect and not self.made_progress

    @property
    def reserved(self) -> int:
        """Tokens set aside for the request, which grow with its answer."""
        return next_tokens(self.held, self.left)
