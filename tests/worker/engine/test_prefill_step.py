"""Chunks of a plan: which share a pass, which are mixed into the decode, and in what order."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save, SegmentPart
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.worker.contract.engine import PrefillChunk
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill
from mlx_dp.worker.engine.prefill_step import PrefillStep
from tests.support.batches.tiny_batches import loaded_tiny, prefilled, prompt_of

pytestmark = pytest.mark.mlx


@dataclass
class Recorded:
    """A model that records the shape of the tokens of every forward pass."""

    model: Any
    passes: list[tuple[int, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.passes.append(tokens.shape)
        return self.model(tokens, cache=cache)


class Step:
    """One step's prompts.

    Slots are the keys of ``prefills``; ``ended`` has them as they end.
    """

    def __init__(self, name: str = "llama", *, decoding: bool = False, pads: bool = False) -> None:
        loaded = loaded_tiny(name)
        self.model = Recorded(loaded.model)
        self.loaded = replace(loaded, model=self.model)
        self.caches = DecodeCaches(self.loaded, BatchForm(split=True, pads=pads))
        self.segments = Segments()
        self.prefills: dict[int, Prefill] = {}
        self.ended: list[int] = []
        self.begin(decoding=decoding)

    def begin(self, *, decoding: bool) -> None:
        self.step = PrefillStep(self.caches, self.segments, decoding=decoding)

    def run(self, slot: int, prompt: list[int], num_tokens: int, **chunk: Any) -> None:
        prefill = self.prefills.setdefault(slot, Prefill(self.loaded, prompt))
        given = PrefillChunk(slot=slot, num_tokens=num_tokens, **chunk)
        self.step.run(prefill, given, self.ending(slot))

    def ending(self, slot: int) -> Callable[[], None]:
        return lambda: self.ended.append(slot)

    def expect_whole(self, slot: int, prompt: list[int]) -> None:
        """The prompt is in, and its caches are those of a run alone."""
        assert self.prefills[slot].complete
        found, expected = self.prefills[slot].content(), prefilled(self.loaded, prompt).content()
        assert found is not None and expected is not None
        pairs = [
            (a, b)
            for ours, theirs in zip(found.kv, expected.kv, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        pairs += zip(found.recent.arrays(), expected.recent.arrays(), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-4, atol=1e-4)


def test_short_prompts_share_a_forward_pass_and_end_in_their_order():
    step = Step()
    prompts = {slot: prompt_of(length, slot) for slot, length in ((4, 9), (0, 64), (2, 1), (7, 20))}
    for slot, prompt in prompts.items():
        step.run(slot, prompt, len(prompt))
    assert step.model.passes == []
    assert step.step.finish() == []
    assert step.model.passes == [(8 + 63 + 0 + 19, 1)]
    assert step.ended == [4, 0, 2, 7]
    for slot in (4, 0, 7):
        step.expect_whole(slot, prompts[slot])


def test_passes_that_are_shared_stay_below_512_tokens():
    step = Step()
    for slot in range(10):
        step.run(slot, prompt_of(60, slot), 60)
    step.step.finish()
    assert step.model.passes == [(8 * 59, 1), (2 * 59, 1)]
    assert step.ended == list(range(10))


def test_a_prompt_without_company_runs_as_it_would_alone():
    step = Step()
    step.run(3, prompt_of(20), 20)
    step.step.finish()
    assert step.model.passes == [(1, 19)]
    assert step.ended == [3]


def test_a_long_chunk_runs_alone_and_at_once():
    step = Step(decoding=True)
    step.run(0, prompt_of(65), 65)
    assert step.model.passes == [(1, 64)]
    assert step.ended == [0]
    assert step.step.fence is not None


def test_a_short_chunk_that_does_not_end_its_prompt_is_mixed_into_the_decode():
    step = Step(decoding=True)
    step.run(0, prompt_of(50), 40)
    step.run(1, prompt_of(50, 1), 24)
    # Room for 64 such tokens, no more.
    step.run(2, prompt_of(50, 2), 1)
    assert step.model.passes == [(1, 1)]
    chunks = step.step.finish()
    assert [(chunk.chunk.position, chunk.chunk.num_tokens) for chunk in chunks] == [
        (0, 40),
        (0, 24),
    ]
    assert [chunk.prefill for chunk in chunks] == [step.prefills[0], step.prefills[1]]
    assert step.ended == []


def test_a_chunk_that_leaves_the_last_token_is_mixed_and_the_prompt_then_joins_without_a_pass():
    step = Step(decoding=True)
    step.run(0, prompt_of(41), 40)
    chunks = step.step.finish()
    assert [chunk.chunk.num_tokens for chunk in chunks] == [40]
    assert step.model.passes == []
    step.caches.run_chunks(chunks)
    step.begin(decoding=True)
    step.run(0, prompt_of(41), 1)
    assert step.step.finish() == []
    assert step.model.passes == [(40, 1)]
    assert step.ended == [0]
    step.expect_whole(0, prompt_of(41))


def test_with_nothing_to_decode_a_chunk_runs_alone():
    step = Step(decoding=False)
    step.run(0, prompt_of(50), 40)
    assert step.model.passes == [(1, 40)]
    assert step.step.finish() == []


@pytest.mark.parametrize("kept", [{"snapshot": 5}, {"saves": (Save(1, 0, 40),)}])
def test_a_chunk_of_which_something_is_kept_is_not_mixed(kept):
    step = Step("gemma3_text", decoding=True)
    step.run(0, prompt_of(50), 40, **kept)
    assert step.model.passes == [(1, 40)]
    assert step.segments.nbytes > 0


def test_a_chunk_that_leaves_the_last_token_over_shares_a_pass_and_does_not_end_its_prompt():
    step = Step()
    step.run(0, prompt_of(21), 20)
    step.run(1, prompt_of(9, 1), 9)
    step.step.finish()
    assert step.model.passes == [(28, 1)]
    assert step.ended == [1]
    step.begin(decoding=True)
    step.run(0, prompt_of(21), 1)
    step.step.finish()
    assert step.model.passes == [(28, 1)]
    assert step.ended == [1, 0]
    step.expect_whole(0, prompt_of(21))


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_prompts_of_models_with_states_run_alone(name):
    step = Step(name, decoding=True)
    step.run(0, prompt_of(50), 40)
    step.run(1, prompt_of(9, 1), 9)
    assert step.model.passes == [(1, 40), (1, 8)]
    assert step.step.finish() == []
    assert step.ended == [1]


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gear", "mamba2"])
def test_short_prompts_of_models_that_keep_padding_out_share_a_padded_pass(name):
    step = Step(name, decoding=True, pads=True)
    prompts = {slot: prompt_of(length, slot) for slot, length in ((4, 24), (0, 9), (2, 1), (7, 21))}
    for slot, prompt in prompts.items():
        step.run(slot, prompt, len(prompt))
    step.run(8, prompt_of(50), 40)
    assert step.model.passes == [(1, 40)]
    assert step.step.finish() == []
    assert step.model.passes == [(1, 40), (3, 23)]
    assert sorted(step.ended) == [0, 2, 4, 7]
    for slot in (4, 0, 7):
        step.expect_whole(slot, prompts[slot])


def test_a_padded_pass_takes_prompts_of_like_length_only():
    step = Step("qwen3_next", pads=True)
    for slot, length in enumerate((5, 64, 8, 60, 3)):
        step.run(slot, prompt_of(length, slot), length)
    step.step.finish()
    assert step.model.passes == [(3, 7), (2, 63)]
    for slot, length in enumerate((5, 64, 8, 60, 3)):
        step.expect_whole(slot, prompt_of(length, slot))


def test_ends_of_prompts_share_a_padded_pass_with_prompts_that_begin():
    step = Step("qwen3_next", pads=True)
    first, second = prompt_of(70), prompt_of(9, 1)
    step.run(0, first, 64, snapshot=3)
    step.run(0, first, 6, snapshot=4)
    step.run(1, second, 9, snapshot=5)
    step.step.finish()
    assert step.model.passes == [(1, 64), (2, 8)]
    assert [step.segments.read_snapshot(number).position for number in (3, 4, 5)] == [64, 69, 8]
    step.expect_whole(0, first)
    step.expect_whole(1, second)
    kept = step.segments.read_snapshot(4).arrays()
    whole = prefilled(step.loaded, first).content()
    assert whole is not None
    for ours, theirs in zip(kept, whole.recent.arrays(), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4)


def test_a_prompt_is_split_where_it_is_told_and_its_state_is_tracked_there():
    step = Step("qwen3_next")
    prompt = prompt_of(70)
    step.run(0, prompt, 64, snapshot=3)
    step.run(0, prompt, 6, snapshot=4)
    assert step.model.passes == [(1, 64), (1, 5)]
    assert [step.segments.read_snapshot(number).position for number in (3, 4)] == [64, 69]
    at_64 = prefilled(step.loaded, prompt[:65]).content()
    assert at_64 is not None
    tracked = step.segments.read_snapshot(3)
    for ours, theirs in zip(tracked.arrays(), at_64.recent.arrays(), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-5)


def prefix_of(num_tokens: int, snapshot: int | None = None) -> CachedPrefix:
    pieces = (SegmentPart(1, num_tokens),)
    return CachedPrefix(pieces=pieces, num_tokens=num_tokens, snapshot=snapshot)


@pytest.mark.parametrize("size", [20, 90])
def test_a_prompt_begins_with_what_an_earlier_one_of_the_same_plan_saves(size):
    step = Step()
    first = prompt_of(40)
    second = [*first[:39], *prompt_of(size, 1)]
    step.run(0, first, 40, saves=(Save(1, 0, 39),))
    assert step.model.passes == []
    step.run(1, second, size, prefix=prefix_of(39))
    step.step.finish()
    assert step.model.passes == [(1, 39), (1, size - 1)]
    assert step.ended == [0, 1]
    step.expect_whole(1, second)


def test_a_prompt_begins_with_a_snapshot_that_an_earlier_one_of_the_same_plan_takes():
    # The KV has been there before, from a request whose snapshot is gone.
    step = Step("gemma3_text")
    prompt = prompt_of(40)
    step.run(9, prompt, 40, saves=(Save(1, 0, 39),))
    step.step.finish()
    step.begin(decoding=False)
    step.run(0, prompt, 40, snapshot=2)
    step.run(1, [*prompt, 7, 8], 3, prefix=prefix_of(39, snapshot=2))
    step.step.finish()
    step.expect_whole(1, [*prompt, 7, 8])


def test_what_is_saved_while_others_share_the_pass_is_the_prompts_own():
    step = Step("gemma3_text")
    prompts = [prompt_of(30), prompt_of(12, 1)]
    step.run(0, prompts[0], 30, saves=(Save(1, 0, 29),), snapshot=1)
    step.run(1, prompts[1], 12, saves=(Save(2, 4, 11),), snapshot=2)
    step.step.finish()
    assert step.model.passes == [(29 + 11, 1)]
    for number, (prompt, start) in enumerate(((prompts[0], 0), (prompts[1], 4)), start=1):
        whole = prefilled(step.loaded, prompt).content()
        assert whole is not None
        read = step.segments.read_prefix(
            CachedPrefix(pieces=(SegmentPart(number, 99),), num_tokens=99)
        )
        end = len(prompt) - 1
        np.testing.assert_allclose(
            np.array(read[0].keys), np.array(whole.kv[0].tokens(start, end).keys), atol=1e-5
        )
        assert step.segments.read_snapshot(number).position == end
