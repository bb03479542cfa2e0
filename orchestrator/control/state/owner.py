"""Owners: the grants and the free room of each, and the reasons that keep requests away from it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, answer_tokens, fits, next_tokens
from mlx_dp.proto.messages.events import Heartbeat, Ready

LONGEST_SHORTAGE_HEARTBEATS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one owner would set aside for one request."""

    max_tokens: int
    reserved_tokens: int
    """Tokens that the request needs there next."""
    cached_tokens: int = 0
    """Tokens of the request that the owner is thought to hold already."""


def terms(limits: AdmissionLimits, entry: RequestEntry) -> Terms | None:
    """Compute what an owner must set aside for a request; None when it can never run there."""
    prompt_tokens = len(entry.generation.prompt_ids)
    max_tokens = entry.max_tokens
    if max_tokens is None:
        max_tokens = answer_tokens(limits, prompt_tokens, entry.generation.max_tokens)
    if not fits(limits, prompt_tokens, max_tokens):
        return None
    needed = next_tokens(entry.num_tokens, max_tokens - len(entry.emitted))
    return Terms(max_tokens=max_tokens, reserved_tokens=needed)


class Hold(StrEnum):
    """A reason why an owner gets no further request at present, and what lifts it."""

    CLOSED = "closed"
    """It drains, or its process has exited. Lasts until the owner is removed."""
    SUSPICIOUS = "suspicious"
    """Some heartbeats are missing. Lifted by the next one."""
    CONGESTED = "congested"
    """A message could not be sent, since its channel was full or gone. Lifted by a heartbeat."""
    SHORT_OF_MEMORY = "short_of_memory"
    """It rejected or preempted a request for lack of room, and would do so again at once. Lifted
    after some heartbeats, or when one of its requests ends."""


@dataclass(slots=True, eq=False)
class Owner:
    """One ready owner, the holder of one rank's slice, and everything that it was granted.

    Invariant: the totals are the sums over ``grants``. A grant fits into the free room when it is
    made. Answers may outgrow that room; the owner then preempts its youngest requests.
    """

    dp_rank: int
    identity: str
    ready: Ready
    heartbeats: Heartbeats
    ahead: int = 0
    """Requests that it may be granted beyond its slots, so that it never waits for the next one."""
    holds: set[Hold] = field(default_factory=set)
    """It gets requests only while there are none."""
    overdue: bool = False
    """It is silent, or makes no progress, for longer than its step may take. Only reported: until
    it counts as lost, it holds back no request by itself."""
    shortages: int = 0
    short_until_heartbeat: int = 0
    grants: dict[int, Grant] = field(default_factory=dict)
    unaccepted: dict[int, Grant] = field(default_factory=dict)
    aborting: dict[int, Grant] = field(default_factory=dict)
    reserved_tokens: int = 0
    held_tokens: int = 0
    unprefilled_tokens: int = 0
    prefilling: int = 0

    @property
    def limits(self) -> AdmissionLimits:
        return AdmissionLimits(
            context_length=self.ready.context_length,
            pool_tokens=self.ready.capacity.pool_tokens,
        )

    @property
    def takes_requests(self) -> bool:
        return not self.holds

    @property
    def free_slots(self) -> int:
        return self.ready.capacity.request_slots + self.ahead - len(self.grants)

    @property
    def free_tokens(self) -> int | None:
        """KV tokens not set aside for any request; None when the model has no token pool.

        Below 0 when answers have grown beyond the pool.
        """
        pool = self.ready.capacity.pool_tokens
        return None if pool is None else pool - self.reserved_tokens

    def has_room(self, needed: Terms) -> bool:
        free_tokens = self.free_tokens
        return self.free_slots > 0 and (
            free_tokens is None or needed.reserved_tokens <= free_tokens
        )

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Apply a heartbeat: the worker is alive, and may get requests again.

        Its memory use does not matter: it makes room for a request by dropping cached prefixes and
        unused rows, and a refusal costs little.
        """
        self.heartbeats.note_heartbeat(heartbeat, now)
        self.holds -= {Hold.SUSPICIOUS, Hold.CONGESTED}
        if self.heartbeats.num_received >= self.short_until_heartbeat:
            self.holds.discard(Hold.SHORT_OF_MEMORY)

    def note_silence(self, *, suspicious: bool) -> None:
        """Hold requests back from an owner that has been silent for too long, else lift that."""
        if suspicious:
            self.holds.add(Hold.SUSPICIOUS)
        else:
            self.holds.discard(Hold.SUSPICIOUS)

    def extend_deadlines(self, now: float, missed_s: float) -> None:
        """Extend all deadlines by the time that the controller itself missed."""
        self.heartbeats.restart_clocks(now)
        for grant in self.grants.values():
            # Some were granted after the controller woke up, but before it noticed the gap.
            grant.since = min(grant.since + missed_s, now)

    def release_unserved(self, grant: Grant) -> None:
        """Free the slot of a request that the owner gave back for lack of room.

        The owner then gets no requests for a while. The pause doubles with each shortage in a row
        while other requests run there, since only the end of one of them makes room.
        """
        shortages = self.shortages
        self.release(grant)
        if not self.grants:
            shortages = 0
        self.holds.add(Hold.SHORT_OF_MEMORY)
        self.shortages = shortages + 1
        self.short_until_heartbeat = self.heartbeats.num_received + min(
            2**shortages, LONGEST_SHORTAGE_HEARTBEATS
        )

    @property
    def runs_sole_suspect(self) -> bool:
        """Whether it runs a request that was in a crash before and has no token here yet."""
        return any(grant.is_sole_suspect for grant in self.grants.values())

    def grant(self, entry: RequestEntry, granted: Terms, now: float) -> Grant:
        """Set a slot and tokens aside for the present epoch of the request."""
        assert self.has_room(granted), f"owner {self.dp_rank} has no room for {entry.request_id}"
        assert entry.request_id not in self.grants, f"{entry.request_id} is granted here already"
        grant = Grant(
            request_id=entry.request_id,
            epoch=entry.epoch,
            held_tokens=entry.num_tokens,
            remaining_tokens=granted.max_tokens - len(entry.emitted),
            unprefilled_tokens=entry.num_tokens - granted.cached_tokens,
            since=now,
            heartbeats_before=self.heartbeats.num_received,
            suspect=entry.crashes > 0,
        )
        assert grant.reserved_tokens == granted.reserved_tokens, (grant, granted)
        self.grants[entry.request_id] = grant
        self.unaccepted[entry.request_id] = grant
        self.reserved_tokens += grant.reserved_tokens
        self.held_tokens += grant.held_tokens
        self.unprefilled_tokens += grant.unprefilled_tokens
        self.prefilling += 1
        return grant

    def grant_of(self, request_id: int, epoch: int) -> Grant | None:
        """The grant of exactly this epoch of the request, or None."""
        grant = self.grants.get(request_id)
        return grant if grant is not None and grant.epoch == epoch else None

    def note_accepted(self, grant: Grant) -> None:
        grant.accepted = True
        self.unaccepted.pop(grant.request_id, None)

    def note_prefilled(self, grant: Grant) -> None:
        """Note that the whole prompt is computed."""
        if grant.prefilled:
            return
        grant.prefilled = True
        self.prefilling -= 1
        self.unprefilled_tokens -= grant.unprefilled_tokens
        grant.unprefilled_tokens = 0

    def start_abort(self, grant: Grant) -> None:
        """Mark a grant whose abort is due; its slot stays taken until the owner confirms."""
        self.aborting[grant.request_id] = grant

    def note_abort_sent(self, grant: Grant, now: float) -> None:
        """Note that the abort was sent; the owner's confirmation is due from now on."""
        grant.abort_sent = True
        grant.since = now
        grant.heartbeats_before = self.heartbeats.num_received

    def note_tokens(self, grant: Grant, num_tokens: int) -> None:
        """Account for tokens that the owner has sent for this grant."""
        grant.made_progress = True
        self.reserved_tokens -= grant.reserved_tokens
        grant.held_tokens += num_tokens
        grant.remaining_tokens -= num_tokens
        self.reserved_tokens += grant.reserved_tokens
        self.held_tokens += num_tokens

    def release(self, grant: Grant) -> None:
        """Free the slot of a grant that the owner has ended."""
        self.note_prefilled(grant)
        del self.grants[grant.request_id]
        self.unaccepted.pop(grant.request_id, None)
        self.aborting.pop(grant.request_id, None)
        self.reserved_tokens -= grant.reserved_tokens
        self.held_tokens -= grant.held_tokens
        self.holds.discard(Hold.SHORT_OF_MEMORY)
        self.shortages = 0

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        grants = self.grants.values()
        assert self.reserved_tokens == sum(grant.reserved_tokens for grant in grants), self.dp_rank
        assert self.held_tokens == sum(grant.held_tokens for grant in grants), self.dp_rank
        assert self.unprefilled_tokens == sum(grant.unprefilled_tokens for grant in grants), (
            self.dp_rank
        )
        assert self.prefilling == sum(not grant.prefilled for grant in grants), self.dp_rank
        assert sum(grant.is_sole_suspect for grant in grants) <= 1, self.dp_rank
        assert self.free_slots >= 0, (self.dp_rank, self.free_slots)
        assert all(grant.remaining_tokens >= 0 for grant in grants), self.dp_rank
        assert all(not grant.accepted for grant in self.unaccepted.values()), self.dp_rank
        assert self.unaccepted.keys() | self.aborting.keys() <= self.grants.keys(), self.dp_rank
