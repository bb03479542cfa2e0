"""The order of a pass, in a group of one. Other tests check what ranks compute together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.worker.contract.peers import RankLostError
from mlx_dp.worker.lockstep.announcement import RankRows
from mlx_dp.worker.lockstep.lockstep import BrokenPassError, Lockstep
from mlx_dp.worker.lockstep.rank_model import LockstepModel
from mlx_dp.worker.shards.sharded_block import BlockRecord

pytestmark = pytest.mark.mlx

WIDTH = 4
CALLS = (0, 1, 0)


class FakeAgreement:
    fd = 5

    def __init__(self) -> None:
        self.announced: list[RankRows] = []
        self.lost = False

    def wanted(self) -> bool:
        return False

    def agree(self, rows: RankRows, awaiting: Callable[[int], None]) -> tuple[RankRows, ...]:
        if self.lost:
            raise RankLostError("rank 1 is gone", 1)
        self.announced.append(rows)
        return (rows,)

    def close(self) -> None: ...


class Watch:
    def awaiting(self, rank: int) -> None: ...

    def agreed(self, peer_tokens: int) -> None: ...


class Blocks:
    """Two blocks, each of which adds its number and one; they record the rows of each call.

    ``answers``: the second makes logits.
    """

    def __init__(self, *, answers: bool = False) -> None:
        self.seen: list[tuple[int, int]] = []
        self.agreement = FakeAgreement()
        self.lockstep = Lockstep(mx.distributed.init(), Watch())
        blocks = [SimpleNamespace(shard=self.shard(index)) for index in (0, 1)]
        record = BlockRecord(
            name="mlp",
            width=WIDTH,
            dtype=mx.float32,
            output_width=WIDTH,
            output_dtype=mx.float32,
            nbytes=0,
            kept_nbytes=0,
        )
        records = (record, replace(record, answers=answers))
        sharded: Any = SimpleNamespace(blocks=blocks, records=records, calls=CALLS)
        self.lockstep.bind(sharded, self.agreement)

    def shard(self, index: int) -> Callable[[mx.array], mx.array]:
        def run(rows: mx.array) -> mx.array:
            self.seen.append((index, rows.shape[0]))
            return rows + (index + 1)

        return run

    def model(
        self, calls: Sequence[int], error: Exception | None = None, dtype: Any = mx.float32
    ) -> LockstepModel:
        """A model that calls these blocks, and then fails if asked to."""

        def forward(tokens: mx.array, cache: Any) -> mx.array:
            rows = mx.zeros((tokens.size, WIDTH), dtype=dtype)
            for block in calls:
                rows = self.lockstep.run(block, rows, self.shard(block))
            if error is not None:
                raise error
            return rows

        return LockstepModel(forward, self.lockstep)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


TOKENS = mx.zeros((1, 3), dtype=mx.int32)
WHOLE = [(0, 3), (1, 3), (0, 3)]


def test_a_pass_runs_its_blocks_on_the_rows_that_were_agreed_on(blocks: Blocks) -> None:
    result = blocks.model(CALLS)(TOKENS, cache=None)
    assert blocks.agreement.announced == [(3, 0)]
    assert blocks.seen == WHOLE
    assert mx.all(result == 4).item()


@pytest.mark.parametrize("calls", [(1, 0, 0), (0, 0, 1), (0, 1, 0, 1), (0, 1), ()])
def test_other_calls_than_at_load_are_refused_and_the_peers_get_the_whole_pass(
    blocks: Blocks, calls: tuple[int, ...]
) -> None:
    with pytest.raises(BrokenPassError):
        blocks.model(calls)(TOKENS, cache=None)
    assert blocks.seen == WHOLE
    # The next pass is as if nothing had been.
    blocks.model(CALLS)(TOKENS, cache=None)
    assert blocks.seen == WHOLE * 2


def test_rows_of_another_kind_are_refused_before_they_are_exchanged(blocks: Blocks) -> None:
    with pytest.raises(BrokenPassError, match="float16"):
        blocks.model(CALLS, dtype=mx.float16)(TOKENS, cache=None)
    assert blocks.seen == WHOLE


def test_another_number_of_rows_than_announced_is_refused(blocks: Blocks) -> None:
    blocks.lockstep.begin(3, 0)
    with pytest.raises(BrokenPassError, match=r"\(2, 4\)"):
        blocks.lockstep.run(0, mx.zeros((2, WIDTH)), blocks.shard(0))
    assert blocks.seen == []


def test_a_block_outside_of_a_pass_is_refused(blocks: Blocks) -> None:
    with pytest.raises(BrokenPassError):
        blocks.lockstep.run(0, mx.zeros((2, WIDTH)), blocks.shard(0))


def test_the_peers_get_the_rest_of_a_pass_whose_model_broke_off(blocks: Blocks) -> None:
    with pytest.raises(ValueError, match="odd rows"):
        blocks.model((0,), ValueError("odd rows"))(TOKENS, cache=None)
    assert blocks.seen == WHOLE


def test_nothing_more_is_launched_once_the_peers_are_gone(blocks: Blocks) -> None:
    gone = RuntimeError("[ring] connection to a peer was lost")
    with pytest.raises(RuntimeError, match="lost"):
        blocks.model((0,), gone)(TOKENS, cache=None)
    assert blocks.seen == [(0, 3)]


def test_a_pass_that_is_not_agreed_on_does_not_begin(blocks: Blocks) -> None:
    blocks.agreement.lost = True
    with pytest.raises(RankLostError):
        blocks.model(CALLS)(TOKENS, cache=None)
    assert blocks.seen == []


def test_a_rank_without_rows_runs_all_blocks_without_any(blocks: Blocks) -> None:
    blocks.lockstep.take_part()
    assert blocks.agreement.announced == [(0, 0)]
    assert blocks.seen == [(0, 0), (1, 0), (0, 0)]


def test_what_is_no_call_is_the_models_own() -> None:
    blocks = Blocks()
    model: Any = LockstepModel(SimpleNamespace(layers=[1, 2]), blocks.lockstep)
    assert model.layers == [1, 2]
    with pytest.raises(AttributeError):
        _ = model.make_cache


def test_a_head_runs_on_rows_of_single_tokens() -> None:
    blocks = Blocks(answers=True)
    blocks.model(CALLS)(mx.zeros((3, 1), dtype=mx.int32), cache=None)
    assert blocks.agreement.announced == [(3, 3)]
    assert blocks.seen == WHOLE


def test_a_chunk_leaves_the_head_out_and_has_no_logits() -> None:
    blocks = Blocks(answers=True)
    result = blocks.model((0, 1))
    with pytest.raises(BrokenPassError, match="2 blocks of 3"):
        result(TOKENS, cache=None)
    assert blocks.seen == [(0, 3), (0, 3)]
    blocks.lockstep.begin(3, 0)
    blocks.lockstep.run(0, mx.zeros((3, WIDTH)), blocks.shard(0))
    logits = blocks.lockstep.run(1, mx.zeros((3, WIDTH)), blocks.shard(1))
    assert logits.shape == (3, WIDTH)
    assert mx.all(mx.isnan(logits)).item()


def test_an_idle_rank_leaves_the_head_out_when_nobody_wants_logits() -> None:
    blocks = Blocks(answers=True)
    blocks.lockstep.take_part()
    assert blocks.seen == [(0, 0), (0, 0)]
