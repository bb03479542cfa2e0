"""Cache flush: has every ready owner drop its cached prefixes, and collects the results."""

from dataclasses import dataclass, field
from typing import Final

from mlx_dp.orchestrator.api import FlushOutcome, OwnerFlush
from mlx_dp.orchestrator.control.requests.dispatch import Post
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.proto.messages.commands import Flush
from mlx_dp.proto.messages.events import Flushed


@dataclass(slots=True)
class _Flush:
    """One flush. ``unsent``: owners whose channel is full; ``pending``: owners yet to report."""

    unsent: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    results: dict[int, OwnerFlush] = field(default_factory=dict)


class CacheFlushes:
    """The flushes in progress. An owner that is not ready has nothing to flush."""

    def __init__(self, num_owners: int, ranks: RankTable, post: Post) -> None:
        self._num_owners: Final = num_owners
        self._ranks: Final = ranks
        self._post: Final = post
        self._flushes: Final[dict[int, _Flush]] = {}
        self._last_id = 0

    def begin(self) -> int:
        """Send a flush to every ready owner, and return its id."""
        self._last_id += 1
        flush = self._flushes[self._last_id] = _Flush()
        flush.unsent.update(owner.dp_rank for owner in self._ranks.owners())
        self._send(self._last_id, flush)
        return self._last_id

    def retry(self) -> None:
        """Send again to the owners whose channels were full."""
        for flush_id, flush in self._flushes.items():
            self._send(flush_id, flush)

    def _send(self, flush_id: int, flush: _Flush) -> None:
        for dp_rank in sorted(flush.unsent):
            owner = self._ranks.get(dp_rank)
            assert owner is not None, f"owner {dp_rank} was lost, but flush {flush_id} is still due"
            if self._post(owner, Flush(flush_id=flush_id)):
                flush.unsent.remove(dp_rank)
                flush.pending.add(dp_rank)

    def on_flushed(self, dp_rank: int, event: Flushed) -> bool:
        """Record an owner's report. False: the flush has ended, or the owner reported before."""
        flush = self._flushes.get(event.flush_id)
        if flush is None or dp_rank not in flush.pending:
            return False
        flush.pending.remove(dp_rank)
        flush.results[dp_rank] = OwnerFlush(
            dp_rank=dp_rank,
            outcome=FlushOutcome.FLUSHED,
            num_tokens=event.num_tokens,
            nbytes=event.nbytes,
        )
        return True

    def owner_lost(self, dp_rank: int) -> None:
        """Record that an owner can no longer report."""
        for flush in self._flushes.values():
            if dp_rank in flush.unsent | flush.pending:
                flush.unsent.discard(dp_rank)
                flush.pending.discard(dp_rank)
                flush.results[dp_rank] = OwnerFlush(dp_rank=dp_rank, outcome=FlushOutcome.LOST)

    def done(self, flush_id: int) -> bool:
        flush = self._flushes[flush_id]
        return not flush.unsent and not flush.pending

    def end(self, flush_id: int) -> tuple[OwnerFlush, ...]:
        """End the flush, and return one result for each owner."""
        flush = self._flushes.pop(flush_id)
        late = flush.unsent | flush.pending
        return tuple(
            flush.results.get(dp_rank)
            or OwnerFlush(
                dp_rank=dp_rank,
                outcome=FlushOutcome.TIMEOUT if dp_rank in late else FlushOutcome.NOT_READY,
            )
            for dp_rank in range(self._num_owners)
        )
