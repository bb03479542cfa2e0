"""One ready owner, and what each of its slots is held for."""

from dataclasses import dataclass, field
from typing import Final

from mlx_dp.orchestrator.control.ledger import RequestEntry
from mlx_dp.orchestrator.control.liveness import Pulse
from mlx_dp.proto.admission import AdmissionLimits, answer_tokens, fits, next_tokens
from mlx_dp.proto.messages import Heartbeat, Ready

LONGEST_SHORTAGE_BEATS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one request would get from one owner."""

    max_tokens: int
    reserved: int
    """Tokens that it needs there next."""
    cached_tokens: int = 0
    """Those of them that the owner is thought to hold already."""


def terms(limits: AdmissionLimits, entry: RequestEntry) -> Terms | None:
    """Work out what the owner must set aside for a request; None when it can never run there."""
    prompt_tokens = len(entry.generation.prompt_ids)
    max_tokens = entry.max_tokens
    if max_tokens is None:
        max_tokens = answer_tokens(limits, prompt_tokens, entry.generation.max_tokens)
    if not fits(limits, prompt_tokens, max_tokens):
        return None
    needed = next_tokens(entry.num_tokens, max_tokens - len(entry.emitted))
    return Terms(max_tokens=max_tokens, reserved=needed)


@dataclass(slots=True, eq=False)
class Lease:
    """One slot of an owner, held by one grant of one request until the owner gives it back.

    It outlives the request when that was cancelled, since the slot is free only once the owner
    says so. ``beats`` is the owner's at the grant, or at the abort.
    """

    request_id: int
    epoch: int
    held: int
    """Tokens that it has there: prompt and answer so far."""
    left: int
    """Tokens of its answer that are still to come."""
    unfilled: int
    """Tokens that have to be computed before its first one; 0 once it is ``prefilled``."""
    since: float
    beats: int
    suspect: bool = False
    """A worker died with it."""
    accepted: bool = False
    prefilled: bool = False
    fruitful: bool = False
    """Tokens came out of it."""
    abort_sent: bool = False
    withdrawn: bool = False
    """The request has moved on without waiting for the owner, which may still not know."""

    @property
    def on_trial(self) -> bool:
        """Whether the next death here would be laid to it alone."""
        return self.suspect and not self.fruitful

    @property
    def reserved(self) -> int:
        """Tokens set aside for it, which grow with its answer."""
        return next_tokens(self.held, self.left)


@dataclass(slots=True, eq=False)
class Owner:
    """One ready owner and everything that it holds for us.

    Invariant: the totals are the sums over ``leases``. A grant fits into what is free; answers
    that grow may then exceed it, and the owner itself sees to that by preempting the youngest.
    """

    index: int
    identity: str
    ready: Ready
    pulse: Pulse
    ahead: int = 0
    """Requests that it may be granted beyond its slots, to have the next one at hand."""
    closed: bool = False
    """Drains: gets nothing any more."""
    suspicious: bool = False
    """Some heartbeats are missing: gets nothing until it is heard again."""
    overdue: bool = False
    """It is silent, or makes no progress, for longer than its step may take."""
    congested: bool = False
    """Its channel took nothing: gets nothing until it is heard again."""
    short: bool = False
    """It refused or preempted a request: it gets nothing until some beats later, or one ends
    there. To ask at once would have it refuse, or undo, the same again."""
    shortages: int = 0
    short_until_beat: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    unaccepted: dict[int, Lease] = field(default_factory=dict)
    leaving: dict[int, Lease] = field(default_factory=dict)
    reserved_tokens: int = 0
    held_tokens: int = 0
    unfilled_tokens: int = 0
    prefilling: int = 0

    @property
    def limits(self) -> AdmissionLimits:
        return AdmissionLimits(
            context_length=self.ready.context_length,
            pool_tokens=self.ready.capacity.pool_tokens,
        )

    @property
    def takes_requests(self) -> bool:
        return not (self.closed or self.suspicious or self.congested or self.short)

    @property
    def free_slots(self) -> int:
        return self.ready.capacity.request_slots + self.ahead - len(self.leases)

    @property
    def free_tokens(self) -> int | None:
        """KV tokens not set aside for anyone; None when the model has no token pool.

        Below 0 when answers have grown beyond the pool.
        """
        pool = self.ready.capacity.pool_tokens
        return None if pool is None else pool - self.reserved_tokens

    def has_room(self, needed: Terms) -> bool:
        free_tokens = self.free_tokens
        return self.free_slots > 0 and (free_tokens is None or needed.reserved <= free_tokens)

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """It is well, and may be asked again.

        How much it holds is no reason to ask or not: it makes room when it is asked, by dropping
        what it has cached and by giving back what rows have left. It refuses at little cost.
        """
        self.pulse.beat(heartbeat, now)
        self.suspicious = False
        self.congested = False
        if self.pulse.beats >= self.short_until_beat:
            self.short = False

    def forgive(self, now: float, missed_s: float) -> None:
        """Whatever was missed was missed by us: nothing is late by that."""
        self.pulse.forgive(now)
        for lease in self.leases.values():
            # Some may be of the moment after we awoke, before we noticed.
            lease.since = min(lease.since + missed_s, now)

    def ran_short(self, lease: Lease) -> None:
        """It has given a request back, for which it has no memory now.

        Each time in a row it is left alone for longer, while something runs there: only the end of
        that makes room.
        """
        shortages = self.shortages
        self.release(lease)
        if not self.leases:
            shortages = 0
        self.short = True
        self.shortages = shortages + 1
        self.short_until_beat = self.pulse.beats + min(2**shortages, LONGEST_SHORTAGE_BEATS)

    @property
    def tries_suspect(self) -> bool:
        """A request that a worker died with has yielded nothing here yet."""
        return any(lease.on_trial for lease in self.leases.values())

    def grant(self, entry: RequestEntry, granted: Terms, now: float) -> Lease:
        """Set a slot and tokens aside for the entry's present epoch."""
        assert self.has_room(granted), f"owner {self.index} has no room for {entry.request_id}"
        assert entry.request_id not in self.leases, f"{entry.request_id} is leased already"
        lease = Lease(
            request_id=entry.request_id,
            epoch=entry.epoch,
            held=entry.num_tokens,
            left=granted.max_tokens - len(entry.emitted),
            unfilled=entry.num_tokens - granted.cached_tokens,
            since=now,
            beats=self.pulse.beats,
            suspect=entry.deaths > 0,
        )
        assert lease.reserved == granted.reserved, (lease, granted)
        self.leases[entry.request_id] = lease
        self.unaccepted[entry.request_id] = lease
        self.reserved_tokens += lease.reserved
        self.held_tokens += lease.held
        self.unfilled_tokens += lease.unfilled
        self.prefilling += 1
        return lease

    def lease(self, request_id: int, epoch: int) -> Lease | None:
        """The lease of exactly this grant, or None."""
        lease = self.leases.get(request_id)
        return lease if lease is not None and lease.epoch == epoch else None

    def accepted(self, lease: Lease) -> None:
        lease.accepted = True
        self.unaccepted.pop(lease.request_id, None)

    def prefilled(self, lease: Lease) -> None:
        """All of its prompt is in."""
        if lease.prefilled:
            return
        lease.prefilled = True
        self.prefilling -= 1
        self.unfilled_tokens -= lease.unfilled
        lease.unfilled = 0

    def leave(self, lease: Lease) -> None:
        """Nobody wants the request any more: the owner has to be told, and then to answer."""
        self.leaving[lease.request_id] = lease

    def abort_sent(self, lease: Lease, now: float) -> None:
        """The owner was told; from now on its answer is due."""
        lease.abort_sent = True
        lease.since = now
        lease.beats = self.pulse.beats

    def yielded(self, lease: Lease, num_tokens: int) -> None:
        """Tokens came out of this grant."""
        lease.fruitful = True
        self.reserved_tokens -= lease.reserved
        lease.held += num_tokens
        lease.left -= num_tokens
        self.reserved_tokens += lease.reserved
        self.held_tokens += num_tokens

    def release(self, lease: Lease) -> None:
        """The owner gave the slot back, once."""
        self.prefilled(lease)
        del self.leases[lease.request_id]
        self.unaccepted.pop(lease.request_id, None)
        self.leaving.pop(lease.request_id, None)
        self.reserved_tokens -= lease.reserved
        self.held_tokens -= lease.held
        self.short = False
        self.shortages = 0

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        leases = self.leases.values()
        assert self.reserved_tokens == sum(lease.reserved for lease in leases), self.index
        assert self.held_tokens == sum(lease.held for lease in leases), self.index
        assert self.unfilled_tokens == sum(lease.unfilled for lease in leases), self.index
        assert self.prefilling == sum(not lease.prefilled for lease in leases), self.index
        assert sum(lease.on_trial for lease in leases) <= 1, self.index
        assert self.free_slots >= 0, (self.index, self.free_slots)
        assert all(lease.left >= 0 for lease in leases), self.index
        assert all(not lease.accepted for lease in self.unaccepted.values()), self.index
        assert self.unaccepted.keys() | self.leaving.keys() <= self.leases.keys(), self.index
