"""Every request in one table with one state; each of them ends exactly once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mlx_dp.orchestrator.control.life_cycle import step
from mlx_dp.orchestrator.control.prefix_index import PrefixKeys
from mlx_dp.orchestrator.service import Generation
from mlx_dp.proto.errors import ProtocolError


class RequestStatus(StrEnum):
    """A request's life. GRANTED: sent to an owner, which has not accepted it yet."""

    QUEUED = "queued"
    GRANTED = "granted"
    RUNNING = "running"
    FINISHED = "finished"


NEXT: Final[Mapping[RequestStatus, frozenset[RequestStatus]]] = MappingProxyType(
    {
        RequestStatus.QUEUED: frozenset({RequestStatus.GRANTED, RequestStatus.FINISHED}),
        RequestStatus.GRANTED: frozenset(
            {RequestStatus.RUNNING, RequestStatus.QUEUED, RequestStatus.FINISHED}
        ),
        RequestStatus.RUNNING: frozenset({RequestStatus.QUEUED, RequestStatus.FINISHED}),
        RequestStatus.FINISHED: frozenset(),
    }
)


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One request.

    Invariants: ``owner`` is set exactly while GRANTED or RUNNING; ``epoch`` grows by one with
    every grant and never otherwise; ``emitted`` only grows, and only while RUNNING.
    """

    request_id: int
    generation: Generation
    queued_at: float
    status: RequestStatus = RequestStatus.QUEUED
    epoch: int = 0
    owner: int | None = None
    max_tokens: int | None = None
    """None until the first grant, when the client set none, or more than is left anywhere."""
    emitted: list[int] = field(default_factory=list)
    barren_losses: int = 0
    """Owners lost one after another while they ran it, since its last token."""
    silent_losses: int = 0
    """Owners lost one after another before they had accepted it, since its last token."""
    deaths: int = 0
    """Workers that died by their own fault while they ran it."""
    last_owner: int | None = None
    cached_tokens: int | None = None
    """Tokens of its prompt that the first owner to prefill it had; None before that."""
    prefix_keys: PrefixKeys | None = None
    """Made when a policy first asks for them."""
    granted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that a worker has to prefill for it."""
        return len(self.generation.prompt_ids) + len(self.emitted)

    @property
    def pinned(self) -> int | None:
        """The only owner that may have it, or None. An explicit rank holds until a token is out."""
        return None if self.emitted else self.generation.routed_dp_rank


class Ledger:
    """The requests that have not ended. It keeps no clock and does no I/O."""

    def __init__(self) -> None:
        self._entries: Final[dict[int, RequestEntry]] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(self._entries.values())

    def get(self, request_id: int) -> RequestEntry | None:
        """The entry, or None when the request is unknown or has ended."""
        return self._entries.get(request_id)

    def open(self, generation: Generation, now: float) -> RequestEntry:
        """Enter a new request, under an id of ours."""
        self._last_id += 1
        entry = RequestEntry(
            request_id=self._last_id,
            generation=generation,
            queued_at=now,
            max_tokens=generation.max_tokens,
        )
        self._entries[entry.request_id] = entry
        return entry

    def grant(self, entry: RequestEntry, owner: int, now: float) -> None:
        """QUEUED to GRANTED, under a new epoch."""
        _step(entry, RequestStatus.GRANTED)
        entry.epoch += 1
        entry.owner = owner
        entry.last_owner = owner
        if entry.granted_at is None:
            entry.granted_at = now

    def accept(self, entry: RequestEntry) -> None:
        """GRANTED to RUNNING."""
        _step(entry, RequestStatus.RUNNING)

    def prefilled(self, entry: RequestEntry, cached_tokens: int) -> bool:
        """Its prompt is in; True for the first time, which alone counts.

        A replay finds its own prefix, which would count more than the prompt has.
        """
        first = entry.cached_tokens is None
        if first:
            entry.cached_tokens = min(cached_tokens, len(entry.generation.prompt_ids))
        return first

    def append(self, entry: RequestEntry, index: int, ids: tuple[int, ...], now: float) -> bool:
        """Append tokens of the present epoch; False for a duplicate, which changes nothing.

        Raises ProtocolError for a gap, for a chunk that lies half in what is known, and for
        tokens beyond the budget or before ``Accepted``.
        """
        if entry.status is not RequestStatus.RUNNING:
            raise ProtocolError(f"request {entry.request_id}: tokens while {entry.status.value}")
        known = len(entry.emitted)
        if index != known:
            if index + len(ids) <= known:
                return False
            raise ProtocolError(
                f"request {entry.request_id}: tokens {index} to {index + len(ids)} after {known}"
            )
        if entry.max_tokens is not None and known + len(ids) > entry.max_tokens:
            raise ProtocolError(
                f"request {entry.request_id}: {known + len(ids)} tokens of {entry.max_tokens}"
            )
        entry.emitted.extend(ids)
        entry.barren_losses = entry.silent_losses = 0
        if entry.first_token_at is None:
            entry.first_token_at = now
        entry.last_token_at = now
        return True

    def requeue(self, entry: RequestEntry) -> None:
        """GRANTED or RUNNING to QUEUED: its owner was lost, or gave it back."""
        _step(entry, RequestStatus.QUEUED)
        entry.owner = None

    def finish(self, entry: RequestEntry) -> None:
        """Any state but FINISHED to FINISHED. The request leaves the table."""
        _step(entry, RequestStatus.FINISHED)
        entry.owner = None
        del self._entries[entry.request_id]

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        for request_id, entry in self._entries.items():
            assert entry.request_id == request_id, (entry.request_id, request_id)
            assert entry.status is not RequestStatus.FINISHED, f"{request_id} ended but is listed"
            held = entry.status in (RequestStatus.GRANTED, RequestStatus.RUNNING)
            assert held == (entry.owner is not None), (request_id, entry.status, entry.owner)
            assert entry.max_tokens is None or len(entry.emitted) <= entry.max_tokens, request_id
            losses = (entry.barren_losses, entry.silent_losses, entry.deaths)
            assert max(losses) <= entry.epoch, (request_id, losses, entry.epoch)


def _step(entry: RequestEntry, wanted: RequestStatus) -> None:
    entry.status = step(NEXT, "request", entry.request_id, entry.status, wanted)
