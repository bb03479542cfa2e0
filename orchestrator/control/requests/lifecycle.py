"""Request lifecycle: submit, dispatch, cancel, expire, recover after a worker loss."""

from typing import Final

from mlx_dp.orchestrator.api import Ended, Generation
from mlx_dp.orchestrator.control.requests.correlated_crashes import CorrelatedCrashes
from mlx_dp.orchestrator.control.requests.dispatch import Dispatcher
from mlx_dp.orchestrator.control.requests.replay import (
    completion_of,
    count_loss,
    find_sole_suspect,
    refit_answer,
)
from mlx_dp.orchestrator.control.requests.response_stream import BufferedStream, OpenStreams
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Owner, terms
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry, RequestStatus
from mlx_dp.orchestrator.control.state.request_table import RequestTable, failed
from mlx_dp.orchestrator.control.workers.actions import Loss
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.proto.messages.events import FinishReason


class RequestLifecycle:
    """Applies calls, losses and the passing of time to the requests.

    This class decides which transition follows; ``RequestTable`` makes it.
    """

    def __init__(
        self,
        table: RequestTable,
        dispatcher: Dispatcher,
        streams: OpenStreams,
        ranks: RankTable,
        options: QueueOptions,
        max_attempts: int,
    ) -> None:
        self._table: Final = table
        self._dispatcher: Final = dispatcher
        self._streams: Final = streams
        self._ranks: Final = ranks
        self._strict_max_tokens: Final = options.strict_max_tokens
        self._max_attempts: Final = max_attempts
        self._crashes: Final = CorrelatedCrashes()

    @property
    def idle(self) -> bool:
        """No request is queued or running."""
        return len(self._table) == 0

    def submit(self, generation: Generation, max_tokens: int | None, now: float) -> BufferedStream:
        """Queue a request that passed admission, see ``RequestTable.open``."""
        return self._streams.open(self._table.open(generation, max_tokens, now))

    def dispatch(self, now: float) -> None:
        """Grant every request that can be granted now."""
        self._dispatcher.dispatch(now)

    def withdraw(self, owner: Owner, grant: Grant, now: float) -> None:
        """Requeue a request that was not accepted in time, if another owner could take it."""
        entry = self._table.current(grant)
        if entry is not None and self._dispatcher.could_go_elsewhere(entry, owner):
            self._dispatcher.withdraw(owner, grant, entry, now)
            self._streams.withdrawn()

    def cancel(self, request_id: int, now: float) -> None:
        """End a request whose client is gone, unless it has already ended."""
        self._end_known(request_id, FinishReason.ABORT, now)

    def complete(self, request_id: int, now: float) -> None:
        """End a request whose client has all that it requested, unless it has already ended."""
        self._end_known(request_id, FinishReason.STOP, now)

    def _end_known(self, request_id: int, reason: FinishReason, now: float) -> None:
        entry = self._table.get(request_id)
        if entry is not None:
            self._end(entry, Ended(reason=reason), now)

    def _end(self, entry: RequestEntry, ended: Ended, now: float) -> None:
        """End a request that is queued or that an owner still runs."""
        if entry.dp_rank is not None:
            self._dispatcher.abort(entry, now)
        self._table.finish(entry, ended, now)

    def expire(self, now: float) -> None:
        """End the requests whose time is up, and resend the aborts that could not be sent."""
        while (expired := self._table.expired(now)) is not None:
            self._end(*expired, now)
        self._dispatcher.retry_aborts(now)

    def abandon(self, message: str, code: str, now: float) -> None:
        """End every request, since no owner will ever serve it."""
        for entry in tuple(self._table):
            self._end(entry, failed(message, code, 503), now)

    def abandon_pinned(self, dp_rank: int, message: str, now: float) -> None:
        """End the queued requests of one rank, whose owner has failed for good."""
        for entry in tuple(self._table):
            if entry.status is RequestStatus.QUEUED and entry.pinned == dp_rank:
                self._end(entry, failed(message, "worker_failed", 503), now)

    def refit_queued(self, now: float) -> None:
        """Fit queued requests to new limits: owners have less room than before, or failed for good.

        A request that no longer fits anywhere is clamped, as if it arrived now.
        """
        for entry in tuple(self._table):
            limits = self._ranks.limits_for(entry.pinned)
            if entry.status is not RequestStatus.QUEUED or limits is None:
                continue
            if terms(limits, entry) is None:
                ended = refit_answer(entry, limits, strict=self._strict_max_tokens)
                if ended is not None:
                    self._end(entry, ended, now)

    def owner_lost(
        self, grants: tuple[Grant, ...], loss: Loss, *, culprit: bool, now: float
    ) -> None:
        """Requeue or end each request of an owner that was lost."""
        sole_suspect = find_sole_suspect(grants) if culprit else None
        if culprit:
            accepted = frozenset(grant.request_id for grant in grants if grant.accepted)
            self._crashes.add(accepted, now)
        for grant in grants:
            entry = self._table.current(grant)
            if entry is None:
                continue
            if sole_suspect is not None and grant is not sole_suspect:
                ended = completion_of(entry)
            else:
                guilty = culprit and not self._crashes.exonerates(entry.request_id)
                ended = count_loss(
                    entry, grant, loss, culprit=guilty, max_attempts=self._max_attempts
                )
            if ended is not None:
                self._table.finish(entry, ended, now)
            else:
                self._table.requeue(entry, now)
                if grant.accepted:
                    self._streams.replayed()

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        self._table.check()
        self._streams.check({entry.request_id for entry in self._table})
