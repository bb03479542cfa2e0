"""A batch holds, for every row, exactly the written tokens, in any order of events."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_batch import KVBatch
from tests.support.batches.kv_model import expect_content, run_step
from tests.support.batches.kv_reference import (
    MIXED,
    PlainPrompt,
    PlainRow,
    empty_prompt,
    random_row,
)

pytestmark = pytest.mark.mlx


class BatchMachine(RuleBasedStateMachine):
    """Joins, leaves and steps in any order, with slabs so small that rows move all the time."""

    form = BatchForm(split=True)
    slab_tokens = 8

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = KVBatch(
            MIXED, self.form, min_width=4, slab_tokens=self.slab_tokens, tail_tokens=2
        )
        self.rows: dict[int, PlainRow] = {}
        self.prompts: list[PlainPrompt] = []
        self.next_key = 0

    @rule(length=st.integers(0, 14), expected=st.integers(0, 3))
    def join(self, length: int, expected: int) -> None:
        self.join_row(random_row(self.rng, length, MIXED), expected)

    def join_row(self, row: PlainRow, expected: int) -> None:
        length = row.length
        self.batch.join(self.next_key, row.content(), length=length, room=length + expected)
        self.rows[self.next_key] = row
        self.next_key += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rows)))
        self.batch.leave(key)
        del self.rows[key]

    @precondition(lambda self: self.rows)
    @rule()
    def step(self) -> None:
        run_step(self.batch, self.rows, self.rng)

    @rule(room=st.integers(1, 17), share=st.sampled_from([0.1, 0.5, 1.0]))
    def prepare(self, room: int, share: float) -> None:
        self.batch.prepare(room, share)

    @rule()
    def compact(self) -> None:
        self.batch.compact()

    @rule(nbytes=st.none() | st.integers(-100, 10_000))
    def set_spare(self, nbytes: int | None) -> None:
        self.batch.spare_nbytes = nbytes

    @invariant()
    def all_is_as_written(self) -> None:
        if not hasattr(self, "batch"):
            return
        self.batch.check()
        assert self.batch.used_tokens == sum(row.length for row in self.rows.values())
        expect_content(self.batch, self.rows)


class MixedChunkMachine(BatchMachine):
    """Chunks of prompts are mixed in, or share a pass, and their prompts join in the end."""

    @rule()
    def begin_prompt(self) -> None:
        self.prompts.append(empty_prompt(self.rng, MIXED))

    @precondition(lambda self: self.prompts)
    @rule(sizes=st.lists(st.integers(0, 7), min_size=3, max_size=3), decode=st.booleans())
    def step_with_chunks(self, sizes: list[int], decode: bool) -> None:
        chunks = [(prompt, size) for prompt, size in zip(self.prompts, sizes, strict=False) if size]
        if chunks:
            decode = decode and bool(self.rows)
            run_step(self.batch, self.rows, self.rng, chunks, decode=decode)

    @precondition(lambda self: self.prompts)
    @rule(expected=st.integers(0, 3))
    def end_prompt(self, expected: int) -> None:
        self.join_row(self.prompts.pop(0).row, expected)


class OneSlabMachine(BatchMachine):
    form = BatchForm(split=False)


class TailMachine(BatchMachine):
    """Tails so short that they are folded all the time, in slabs with rows of several lengths."""

    form = BatchForm(split=True, tails=True)
    slab_tokens = 32


class TailChunkMachine(MixedChunkMachine):
    form = BatchForm(split=True, tails=True)
    slab_tokens = 32


@pytest.mark.parametrize(
    "machine", [BatchMachine, MixedChunkMachine, OneSlabMachine, TailMachine, TailChunkMachine]
)
def test_every_row_is_exactly_what_was_written_after_any_joins_leaves_and_steps(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=10, stateful_step_count=30, deadline=None, derandomize=True),
    )
