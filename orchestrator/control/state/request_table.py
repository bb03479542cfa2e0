"""Every request, its state, its place in the queue and its deadlines: one table, one life cycle."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from mlx_dp.orchestrator.api import Ended, Generation
from mlx_dp.orchestrator.control.state.deadlines import Deadlines
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry, RequestStatus
from mlx_dp.orchestrator.control.state.request_queue import RequestQueue
from mlx_dp.orchestrator.control.state.transitions import step
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import FinishReason

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


OnFinish = Callable[[RequestEntry, Ended, float], None]
"""Called with each request that has left the table, how it ended, and when."""


class RequestTable:
    """The requests that have not ended: their states, the queue and the deadlines.

    Nothing else changes these three; each method that changes a state makes the whole transition.
    It sends nothing and knows no owners: a caller that takes a request from an owner also notifies
    that owner. Every request has its own deadline. A queued one without tokens also has that of the
    queue. A requeued one with tokens does not have it: it waits because its owner was lost, which
    is not the client's fault.
    """

    def __init__(self, options: QueueOptions, on_finish: OnFinish) -> None:
        self._on_finish: Final = on_finish
        self._entries: Final[dict[int, RequestEntry]] = {}
        self._queue: Final[RequestQueue] = RequestQueue(options.max_queued_requests)
        self._queue_deadlines: Final[Deadlines[int]] = Deadlines(options.queue_timeout_s)
        self._deadlines: Final[Deadlines[int]] = Deadlines(options.request_timeout_s)
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(self._entries.values())

    @property
    def queue(self) -> RequestQueue:
        """For reading only: a request enters and leaves the queue through its transitions."""
        return self._queue

    def get(self, request_id: int) -> RequestEntry | None:
        """The entry, or None when the request is unknown or has ended."""
        return self._entries.get(request_id)

    def current(self, grant: Grant) -> RequestEntry | None:
        """The request of this grant, or None when it has ended or moved on."""
        if grant.withdrawn:
            return None
        entry = self._entries.get(grant.request_id)
        # A request without ``withdrawn`` is requeued only after its grant is gone.
        assert entry is None or entry.epoch == grant.epoch, (grant.request_id, grant.epoch)
        return entry

    def open(self, generation: Generation, max_tokens: int | None, now: float) -> RequestEntry:
        """Add a new request at the end of the queue. The caller has checked that it is not full.

        ``max_tokens``: the maximum output length, or None if that depends on the owner.
        """
        self._last_id += 1
        entry = RequestEntry(
            request_id=self._last_id,
            generation=generation,
            queued_at=now,
            max_tokens=max_tokens,
        )
        self._entries[entry.request_id] = entry
        self._queue.put(entry)
        self._deadlines.start(entry.request_id, now)
        self._queue_deadlines.start(entry.request_id, now)
        return entry

    def grant(self, entry: RequestEntry, dp_rank: int, max_tokens: int, now: float) -> None:
        """QUEUED to GRANTED, under a new epoch: the request was sent to this owner."""
        _step(entry, RequestStatus.GRANTED)
        self._queue.remove(entry)
        self._queue_deadlines.stop(entry.request_id)
        entry.epoch += 1
        entry.dp_rank = entry.last_dp_rank = dp_rank
        entry.max_tokens = max_tokens
        if entry.granted_at is None:
            entry.granted_at = now

    def accept(self, entry: RequestEntry) -> None:
        """GRANTED to RUNNING."""
        _step(entry, RequestStatus.RUNNING)

    def note_prefilled(self, entry: RequestEntry, cached_tokens: int) -> bool:
        """Note that the prompt is prefilled; True for the first time, the only one that counts.

        A replay finds its own earlier output cached, so it would report too many cached tokens.
        """
        first = entry.cached_tokens is None
        if first:
            entry.cached_tokens = min(cached_tokens, len(entry.generation.prompt_ids))
        return first

    def append(self, entry: RequestEntry, index: int, ids: tuple[int, ...], now: float) -> bool:
        """Append tokens of the present epoch; False for a duplicate, which changes nothing.

        Raises ProtocolError for a gap, for a chunk that overlaps the known tokens in part, and for
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
        entry.losses_without_progress = entry.losses_before_accept = 0
        if entry.first_token_at is None:
            entry.first_token_at = now
        entry.last_token_at = now
        return True

    def requeue(self, entry: RequestEntry, now: float) -> None:
        """GRANTED or RUNNING to QUEUED: its owner was lost, or gave the request back.

        It is queued by age. Without tokens, it gets the whole queue time-out again.
        """
        _step(entry, RequestStatus.QUEUED)
        entry.dp_rank = None
        self._queue.put_back(entry)
        if not entry.emitted:
            self._queue_deadlines.start(entry.request_id, now)

    def finish(self, entry: RequestEntry, ended: Ended, now: float) -> None:
        """Any state but FINISHED to FINISHED. The request leaves the table."""
        queued = entry.status is RequestStatus.QUEUED
        _step(entry, RequestStatus.FINISHED)
        entry.dp_rank = None
        if queued:
            self._queue.remove(entry)
        self._queue_deadlines.stop(entry.request_id)
        self._deadlines.stop(entry.request_id)
        del self._entries[entry.request_id]
        self._on_finish(entry, ended, now)

    def expired(self, now: float) -> tuple[RequestEntry, Ended] | None:
        """Return a request whose time is up, and how to ``finish`` it; None if there is none."""
        for deadlines, name, status in (
            (self._queue_deadlines, "queue", 503),
            (self._deadlines, "request", 504),
        ):
            request_id = deadlines.expired(now)
            if request_id is not None:
                entry = self._entries[request_id]
                message = f"the {name} time-out of {deadlines.timeout_s:g} s has passed"
                if entry.status is RequestStatus.QUEUED:
                    message += f", with {len(self._queue)} requests in the queue"
                return entry, failed(message, f"{name}_timeout", status)
        return None

    def check(self) -> None:
        """Assert every invariant; for idle loops and tests."""
        self._queue.check()
        queued = 0
        for request_id, entry in self._entries.items():
            assert entry.request_id == request_id, (entry.request_id, request_id)
            assert entry.status is not RequestStatus.FINISHED, f"{request_id} ended but is listed"
            held = entry.status in (RequestStatus.GRANTED, RequestStatus.RUNNING)
            assert held == (entry.dp_rank is not None), (request_id, entry.status, entry.dp_rank)
            assert entry.max_tokens is None or len(entry.emitted) <= entry.max_tokens, request_id
            losses = (entry.losses_without_progress, entry.losses_before_accept, entry.crashes)
            assert max(losses) <= entry.epoch, (request_id, losses, entry.epoch)
            waits = entry.status is RequestStatus.QUEUED
            queued += waits
            assert waits == (entry in self._queue), (request_id, entry.status)
            assert request_id in self._deadlines, request_id
            limited = waits and not entry.emitted
            assert limited == (request_id in self._queue_deadlines), (request_id, entry.status)
        assert queued == len(self._queue), (queued, len(self._queue))
        assert len(self._deadlines) == len(self._entries), len(self._deadlines)


def failed(message: str, code: str, status: int) -> Ended:
    """The end of a request that could not be served."""
    return Ended(reason=FinishReason.ERROR, message=message, code=code, status=status)


def _step(entry: RequestEntry, wanted: RequestStatus) -> None:
    entry.status = step(NEXT, "request", entry.request_id, entry.status, wanted)
