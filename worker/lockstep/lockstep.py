"""Runs a model's sharded blocks together with the other ranks, pass by pass."""

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import mlx.core as mx

from mlx_dp.proto.messages.events import PassTotals
from mlx_dp.worker.contract.peers import PassWatch
from mlx_dp.worker.lockstep.announcement import RankRows
from mlx_dp.worker.lockstep.group import Group
from mlx_dp.worker.lockstep.pass_counter import PassCounter
from mlx_dp.worker.lockstep.pass_rows import PassRows
from mlx_dp.worker.shards.sharded_block import BlockRecord
from mlx_dp.worker.shards.sharded_load import ShardedModel


class Agreement(Protocol):
    """Agrees with the other ranks on each pass before it begins."""

    @property
    def fd(self) -> int: ...

    def poll_wanted(self) -> bool: ...

    def agree(self, rows: RankRows, awaiting: Callable[[int], None]) -> tuple[RankRows, ...]: ...

    def close(self) -> None: ...


class BrokenPassError(Exception):
    """The model calls other blocks than it did when it was loaded. Nothing was exchanged."""


class Lockstep:
    """One rank's side of all passes. All ranks take part in each forward pass of any rank.

    In a pass all ranks run the same blocks in the same order. Each block gathers the rows of all
    ranks, runs this rank's share of the weights on them, and sums the results. A rank without rows
    takes part with none. All collectives form one chain of dependencies: two independent ones could
    run in a different order on each rank. The chain is launched before its pass ends: a rank may
    wait for a peer's next announcement only when it owes that peer nothing.
    """

    def __init__(
        self, group: Group, watch: PassWatch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group: Final = group
        self._rank: Final[int] = group.rank()
        self._watch = watch
        self._clock: Final = clock
        self._counter: Final = PassCounter()
        self._agreement: Agreement | None = None
        self._sharded: ShardedModel | None = None
        self._rows: PassRows | None = None
        self._answers: PassRows | None = None
        self._done = 0
        self._chain: mx.array | None = None

    @property
    def fd(self) -> int:
        return self._bound_agreement.fd

    def poll_wanted(self) -> bool:
        return self._bound_agreement.poll_wanted()

    @property
    def totals(self) -> PassTotals:
        return self._counter.totals

    def watch(self, watch: PassWatch) -> None:
        self._watch = watch
        self._counter.restart()

    def bind(self, sharded: ShardedModel, agreement: Agreement) -> None:
        """Set the blocks that passes consist of. No pass can begin before."""
        self._sharded, self._agreement = sharded, agreement

    def close(self) -> None:
        """No pass can begin any more."""
        self._bound_agreement.close()

    def begin(self, tokens: int, answered: int) -> None:
        """Agree with all ranks on a pass in which this one has ``tokens`` rows.

        ``answered``: the number of rows that need logits, all of them or none.
        """
        assert answered in (0, tokens), f"{answered} of {tokens}"
        assert self._rows is None, "a pass is open"
        ready_at = self._clock()
        everyone = self._bound_agreement.agree(RankRows(tokens, answered), self._watch.awaiting)
        self._counter.count(tokens=tokens, waited_s=self._clock() - ready_at)
        self._rows = PassRows(counts=tuple(r.tokens for r in everyone), rank=self._rank)
        self._answers = PassRows(counts=tuple(r.answered for r in everyone), rank=self._rank)
        self._done = 0
        self._watch.agreed(self._rows.total - tokens)

    def run(self, block: int, rows: mx.array, shard: Callable[[mx.array], mx.array]) -> mx.array:
        """Run the next block of the pass on own rows: in [n, width], out [n, output width].

        Raises BrokenPassError for a block that is not the next, or rows that were not agreed on.
        """
        expected = self._next()
        found = (block, tuple(rows.shape), rows.dtype)
        if expected is None or expected != found:
            raise BrokenPassError(
                f"call {self._done} of the pass is block {block} on {found[1:]}, expected "
                f"{expected}"
            )
        record = self._record(block)
        together = self._rows_of(record)
        summed = self._exchange(rows[: together.own], shard, together)
        if together.own == rows.shape[0]:
            return summed
        # Nothing reads these logits. NaN would expose a reader.
        absent = mx.array(float("nan"), dtype=record.output_dtype)
        return mx.broadcast_to(absent, (rows.shape[0], record.output_width))

    def end(self) -> None:
        """Launch the pass, including the blocks that the model has not called.

        Raises BrokenPassError if there were any. They run first, since the peers wait for them.
        """
        done = self._done
        self._finish()
        if done < len(self._calls):
            raise BrokenPassError(f"the model called {done} blocks of {len(self._calls)}")

    def abandon(self) -> None:
        """Launch the pass although the model failed; zeros stand for the missing rows."""
        self._finish()

    def take_part(self) -> None:
        """Compute a pass in which this rank has no rows, and launch it."""
        self.begin(0, 0)
        self._finish()

    def _finish(self) -> None:
        assert self._rows is not None, "no pass is open"
        assert self._sharded is not None
        while self._done < len(self._calls):
            block = self._calls[self._done]
            record = self._record(block)
            together = self._rows_of(record)
            zeros = mx.zeros((together.own, record.width), dtype=record.dtype)
            self._exchange(zeros, self._sharded.blocks[block].shard, together)
        self._rows = None
        if self._chain is not None:
            mx.async_eval(self._chain)

    def _exchange(
        self, rows: mx.array, shard: Callable[[mx.array], mx.array], together: PassRows
    ) -> mx.array:
        self._done += 1
        if together is self._answers and not together.total:
            # No rank needs logits, and each of them knows that.
            return rows
        if self._chain is not None:
            rows = mx.depends(rows, self._chain)
        everyone = (
            self._sum_of(rows, together) if together.summed else self._gathered(rows, together)
        )
        self._chain = mx.distributed.all_sum(shard(everyone), group=self._group)
        if together.own == together.total:
            return self._chain
        own: mx.array = self._chain[together.offset : together.offset + together.own]
        return own

    def _gathered(self, rows: mx.array, together: PassRows) -> mx.array:
        """Return the rows of all ranks: each pads to the widest, then the padding is removed."""
        if together.own < together.widest:
            rows = mx.pad(rows, [(0, together.widest - together.own), (0, 0)])
        gathered = mx.distributed.all_gather(rows, group=self._group)
        pieces = [gathered[start:stop] for start, stop in together.pieces]
        if not pieces:
            return gathered
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _sum_of(self, rows: mx.array, together: PassRows) -> mx.array:
        """Return the rows of all ranks: the sum of each rank's own rows among zeros."""
        after = together.total - together.offset - together.own
        laid = mx.pad(rows, [(together.offset, after), (0, 0)])
        return mx.distributed.all_sum(laid, group=self._group)

    def _rows_of(self, record: BlockRecord) -> PassRows:
        assert self._rows is not None and self._answers is not None, "no pass is open"
        return self._answers if record.answers else self._rows

    @property
    def _bound_agreement(self) -> Agreement:
        assert self._agreement is not None, "bind() comes first"
        return self._agreement

    @property
    def _calls(self) -> tuple[int, ...]:
        assert self._sharded is not None, "bind() comes first"
        return self._sharded.calls

    def _record(self, block: int) -> BlockRecord:
        assert self._sharded is not None, "bind() comes first"
        return self._sharded.records[block]

    def _next(self) -> tuple[Any, ...] | None:
        """Return block, shape and dtype of the next call; None: the pass is over."""
        if self._rows is None or self._done == len(self._calls):
            return None
        record = self._record(self._calls[self._done])
        return self._calls[self._done], (self._rows.own, record.width), record.dtype
