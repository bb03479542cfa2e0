"""How requests end: once, whoever ends them, and with the owner told to let go."""

from typing import Final

from mlx_dp.orchestrator.control.answer_desk import AnswerDesk
from mlx_dp.orchestrator.control.deadlines import Deadlines
from mlx_dp.orchestrator.control.dispatch import Dispatcher
from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry, RequestStatus
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.request_queue import RequestQueue
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.service import Ended
from mlx_dp.proto.messages import FinishReason


def error(message: str, code: str, status: int) -> Ended:
    return Ended(reason=FinishReason.ERROR, message=message, code=code, status=status)


class RequestEnds:
    """The one place where requests leave the ledger, and the deadlines that make them.

    Invariant: every request has its own deadline, and the queued ones that of the queue too, until
    a client has tokens of theirs.
    """

    def __init__(
        self,
        options: QueueOptions,
        ledger: Ledger,
        queue: RequestQueue,
        book: OwnerBook,
        answers: AnswerDesk,
        dispatcher: Dispatcher,
    ) -> None:
        self._ledger: Final = ledger
        self._queue: Final = queue
        self._book: Final = book
        self._answers: Final = answers
        self._dispatcher: Final = dispatcher
        self._waits: Final[Deadlines[int]] = Deadlines(options.queue_timeout_s)
        self._lives: Final[Deadlines[int]] = Deadlines(options.request_timeout_s)

    def began(self, entry: RequestEntry, now: float) -> None:
        self._lives.start(entry.request_id, now)
        self._waits.start(entry.request_id, now)

    def granted(self, entry: RequestEntry) -> None:
        """It waits no longer."""
        self._waits.stop(entry.request_id)

    def queued_again(self, entry: RequestEntry, now: float) -> None:
        """It waits anew, within the life that it has left.

        An answer that has begun was let in long ago: to cut it off for having lost its owner would
        be to break a stream for a fault of ours.
        """
        if not entry.emitted:
            self._waits.start(entry.request_id, now)

    def expire(self, now: float) -> None:
        """End what has waited or lived for too long."""
        for request_id in self._waits.expired(now):
            self._expire(request_id, self._waits.timeout_s, "queue", 503, now)
        for request_id in self._lives.expired(now):
            self._expire(request_id, self._lives.timeout_s, "request", 504, now)

    def _expire(
        self, request_id: int, timeout_s: float, which: str, status: int, now: float
    ) -> None:
        entry = self._ledger.get(request_id)
        if entry is None:
            return
        message = f"the {which} time-out of {timeout_s:g} s has passed"
        if entry.status is RequestStatus.QUEUED:
            message += f", with {len(self._queue)} requests in the queue"
        self.end_early(entry, error(message, f"{which}_timeout", status), now)

    def end_early(self, entry: RequestEntry, ended: Ended, now: float) -> None:
        """End a request that is queued, or that an owner is at work on."""
        if entry.status is RequestStatus.QUEUED:
            self._queue.remove(entry)
        else:
            assert entry.owner is not None, f"request {entry.request_id} has no owner"
            owner = self._book.get(entry.owner)
            assert owner is not None, f"request {entry.request_id}: no owner {entry.owner}"
            lease = owner.lease(entry.request_id, entry.epoch)
            assert lease is not None, f"request {entry.request_id} has no lease"
            self._dispatcher.leave(owner, lease, entry, now)
        self.end(entry, ended, now)

    def end(self, entry: RequestEntry, ended: Ended, now: float) -> None:
        """End a request that neither the queue nor an owner has any longer."""
        self._waits.stop(entry.request_id)
        self._lives.stop(entry.request_id)
        self._ledger.finish(entry)
        self._answers.end(entry, ended, now)

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        for entry in self._ledger:
            assert entry.request_id in self._lives, entry.request_id
            queued = entry.status is RequestStatus.QUEUED and not entry.emitted
            assert queued == (entry.request_id in self._waits), (entry.request_id, entry.status)
        assert len(self._lives) == len(self._ledger), (len(self._lives), len(self._ledger))
