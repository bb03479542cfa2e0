"""Who is let in right now: overload is told from error before anything is queued."""

from typing import Final

from mlx_dp.orchestrator.control.counters import Tally
from mlx_dp.orchestrator.control.gate import certain_max_tokens, check_generation, check_rank
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.request_queue import RequestQueue
from mlx_dp.orchestrator.control.rolling_restart import RollingRestart
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.service import (
    RETRY_ABSENT_S,
    RETRY_BUSY_S,
    Generation,
    OverloadedError,
    RefusedError,
    ServiceStatus,
)


class Admission:
    """Lets a request into the queue, or says why not and when to come back.

    Who is away on request is waited for: it was well, and its successor is on its way. Nobody
    knows that of one that was lost.
    """

    def __init__(
        self,
        num_owners: int,
        book: OwnerBook,
        queue: RequestQueue,
        restarts: RollingRestart,
        tally: Tally,
        options: QueueOptions,
    ) -> None:
        self._num_owners: Final = num_owners
        self._book: Final = book
        self._queue: Final = queue
        self._restarts: Final = restarts
        self._tally: Final = tally
        self._strict: Final = options.strict_max_tokens

    def check(self, generation: Generation, status: ServiceStatus) -> int | None:
        """Return the answer's length as far as it is certain, see ``certain_max_tokens``.

        Raises OverloadedError or RefusedError.
        """
        rank = generation.routed_dp_rank
        try:
            check_rank(rank, self._num_owners)
            self._check_presence(rank, status)
            max_tokens = self._check_fit(generation)
        except RefusedError:
            self._tally.requests_refused["invalid"] += 1
            raise
        if self._queue.full:
            raise self._overloaded(
                "queue_full",
                f"the queue is full: {len(self._queue)} of {self._queue.limit} requests queued",
                429,
            )
        return max_tokens

    def _check_presence(self, rank: int | None, status: ServiceStatus) -> None:
        match status:
            case ServiceStatus.READY | ServiceStatus.RESTARTING:
                pass
            case ServiceStatus.STARTING:
                raise self._overloaded("starting", "no worker is ready yet: try again soon", 503)
            case ServiceStatus.DRAINING:
                raise self._overloaded("draining", "the service is shutting down", 503)
            case ServiceStatus.DEAD:
                raise self._overloaded("dead", "all workers have failed", 503)
        if rank is None or self._restarts.replaces(rank):
            return
        owner = self._book.get(rank)
        if owner is None or owner.closed:
            raise self._overloaded("rank_not_ready", f"owner {rank} is not ready", 503)

    def _check_fit(self, generation: Generation) -> int | None:
        limits = self._book.limits_for(generation.routed_dp_rank)
        vocab_size = self._book.vocab_size()
        assert limits is not None, "taken before there was an owner"
        assert vocab_size is not None, "taken before there was an owner"
        max_tokens = certain_max_tokens(generation, limits, strict=self._strict)
        check_generation(generation, vocab_size)
        return max_tokens

    def _overloaded(self, reason: str, message: str, status: int) -> OverloadedError:
        self._tally.requests_refused[reason] += 1
        retry_after_s = RETRY_BUSY_S if status == 429 else RETRY_ABSENT_S
        return OverloadedError(message, status=status, retry_after_s=retry_after_s)
