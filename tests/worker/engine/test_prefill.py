"""A prompt in chunks, or after a cached prefix, leaves the same caches as a whole one."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save, SegmentPart
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.kvcache.row_content import RowContent
from mlx_dp.worker.engine.prefill import Prefill
from mlx_dp.worker.engine.prefill_step import PrefillStep
from tests.support.batches.tiny_batches import KINDS, loaded_tiny, prefilled, prompt_of

pytestmark = pytest.mark.mlx


def expect_same(found: RowContent | None, expected: RowContent | None) -> None:
    assert found is not None and expected is not None
    assert (found.length, found.recent.position) == (expected.length, expected.recent.position)
    for ours, theirs in zip(
        [*(a for kv in found.kv for a in kv), *found.recent.arrays()],
        [*(a for kv in expected.kv for a in kv), *expected.recent.arrays()],
        strict=True,
    ):
        # Recurrent states grow large, and are sums of terms as large.
        atol = 2e-5 * max(1.0, float(mx.abs(theirs).max())) if theirs.size else 0.0
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=atol, rtol=0.0)


class FakeModel:
    """Wraps a model and records the shapes of its tokens, and their offsets."""

    def __init__(self, model: object) -> None:
        self._model = model
        self.seen: list[tuple[int, ...]] = []
        self.offsets: list[int] = []

    @property
    def layers(self):
        return self._model.layers

    def __call__(self, tokens, cache):
        self.seen.append(tokens.shape)
        self.offsets.append(cache[0].offset)
        return self._model(tokens, cache=cache)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunks", [(1, 1, 1), (13,), (5, 20, 1), (34,), (35,)])
def test_chunks_leave_what_a_whole_prompt_leaves(chunks, name):
    loaded = loaded_tiny(name)
    prompt = prompt_of(36)
    expect_same(prefilled(loaded, prompt, chunks).content(), prefilled(loaded, prompt).content())


def test_the_last_token_is_counted_and_left_to_the_batch():
    prefill = Prefill(loaded_tiny("llama"), prompt_of(5))
    assert not prefill.ends_with(3)
    assert prefill.ends_with(4)
    prefill.run(3)
    assert (prefill.done, prefill.complete) == (3, False)
    assert prefill.run(2) is not None
    assert (prefill.done, prefill.complete) == (4, True)
    content = prefill.content()
    assert content is not None
    assert content.length == 4


def test_a_prompt_of_one_token_runs_nothing():
    prefill = Prefill(loaded_tiny("llama"), [7])
    assert prefill.run(1) is None
    assert (prefill.done, prefill.complete, prefill.content()) == (0, True, None)
    assert prefill.nbytes == 0


def test_tokens_beyond_the_prompt_are_our_bug():
    with pytest.raises(AssertionError):
        Prefill(loaded_tiny("llama"), prompt_of(5)).run(6)


def kept(name: str, prompt: list[int], at: int) -> tuple[Segments, CachedPrefix]:
    """The first ``at`` tokens of a prompt, in two segments and, where there is one, a snapshot."""
    loaded = loaded_tiny(name)
    prefill = Prefill(loaded, prompt)
    prefill.run(at)
    segments = Segments()
    saves = (Save(1, 0, at // 2), Save(2, at // 2, at))
    snapshot = 9 if loaded.layout.stateful else None
    PrefillStep.save(prefill, saves, snapshot, segments)
    assert prefill.nbytes > 0
    pieces = (SegmentPart(1, at // 2), SegmentPart(2, at - at // 2))
    return segments, CachedPrefix(pieces=pieces, num_tokens=at, snapshot=snapshot)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("at", [4, 20, 30])
def test_a_prompt_goes_on_behind_a_cached_prefix(at, name):
    prompt = prompt_of(36)
    segments, prefix = kept(name, prompt, at)
    loaded = loaded_tiny(name)
    for chunks in ((), (1,), (3, 1)):
        found = prefilled(loaded, prompt, chunks, prefix=prefix, segments=segments)
        expect_same(found.content(), prefilled(loaded, prompt).content())


@pytest.mark.parametrize("at", [1, 5, 7])
def test_windows_that_are_not_full_are_cut_back_to_a_shorter_match(at):
    loaded = loaded_tiny("gemma3_text")
    prompt = prompt_of(36)
    segments, longer = kept("gemma3_text", prompt, loaded.layout.trims_to)
    (first, second) = longer.pieces
    pieces = [SegmentPart(first.segment, min(at, first.num_tokens))]
    if at > first.num_tokens:
        pieces.append(SegmentPart(second.segment, at - first.num_tokens))
    prefix = CachedPrefix(pieces=tuple(pieces), num_tokens=at, snapshot=longer.snapshot)
    other = [*prompt[:at], *prompt_of(30, 5)]
    found = prefilled(loaded, other, (3, 1), prefix=prefix, segments=segments)
    expect_same(found.content(), prefilled(loaded, other).content())


def test_of_three_tokens_with_two_cached_the_model_sees_one_at_offset_two():
    # A fourth stands for the token that the batch decodes.
    prompt = prompt_of(4)
    segments, prefix = kept("llama", prompt, 2)
    loaded = loaded_tiny("llama")
    model = FakeModel(loaded.model)
    prefill = Prefill(replace(loaded, model=model), prompt)
    prefill.reuse(prefix, segments)
    prefill.run(2)
    assert (model.seen, model.offsets) == ([(1, 1)], [2])
    expect_same(prefill.content(), prefilled(loaded, prompt).content())
    PrefillStep.save(prefill, (Save(3, 2, 3),), None, segments)
    whole = prefilled(loaded, prompt).content()
    assert whole is not None
    covered = segments.read_prefix(
        CachedPrefix(pieces=(*prefix.pieces, SegmentPart(3, 1)), num_tokens=3)
    )
    for ours, theirs in zip(covered, whole.kv, strict=True):
        np.testing.assert_allclose(np.array(ours.keys), np.array(theirs.keys), atol=1e-5)


def test_a_hybrid_begins_with_the_state_that_was_kept_at_the_match():
    prompt = prompt_of(36)
    segments, prefix = kept("qwen3_next", prompt, 20)
    assert prefix.snapshot is not None
    prefill = Prefill(loaded_tiny("qwen3_next"), prompt)
    prefill.reuse(prefix, segments)
    content = prefill.content()
    assert content is not None
    for ours, theirs in zip(
        content.recent.arrays(), segments.read_snapshot(prefix.snapshot).arrays(), strict=True
    ):
        assert mx.array_equal(ours, theirs)
    # The request's later changes to its state leave the kept one as it was.
    before = [np.array(a) for a in segments.read_snapshot(prefix.snapshot).arrays()]
    prefill.run(16)
    mx.eval(prefill.arrays())
    for now, then in zip(segments.read_snapshot(prefix.snapshot).arrays(), before, strict=True):
        np.testing.assert_array_equal(np.array(now), then)


def test_a_prefix_cannot_be_the_whole_prompt_nor_come_late():
    prompt = prompt_of(8)
    segments, prefix = kept("llama", prompt, 6)
    begun = Prefill(loaded_tiny("llama"), prompt)
    begun.run(1)
    with pytest.raises(AssertionError, match="the prefill has begun"):
        begun.reuse(prefix, segments)
    with pytest.raises(AssertionError):
        Prefill(loaded_tiny("llama"), prompt[:6]).reuse(prefix, segments)


def test_what_is_kept_is_a_copy_of_the_tokens_asked_for():
    prompt = prompt_of(12)
    prefill = Prefill(loaded_tiny("llama"), prompt)
    prefill.run(8)
    content = prefill.content()
    assert content is not None
    then = np.array(content.kv[0].keys)[:, :, 3:7]
    segments = Segments()
    mx.eval(segments.save_row([Save(1, 3, 7)], prefill.saved_kv, None, prefill.snapshot))
    prefill.run(4)
    (first, *_) = segments.read_prefix(CachedPrefix(pieces=(SegmentPart(1, 4),), num_tokens=4))
    np.testing.assert_array_equal(np.array(first.keys), then)
    with pytest.raises(AssertionError):
        prefill.saved_kv(Save(2, 0, 12))


def test_a_prompts_caches_have_their_room_at_once():
    prefill = Prefill(loaded_tiny("llama"), prompt_of(300))
    prefill.run(10)
    held = prefill.nbytes
    assert held == 300 * loaded_tiny("llama").shape.kv_bytes_per_token
    prefill.run(290)
    assert prefill.nbytes == held


def test_a_chunk_is_a_share_of_what_is_still_to_be_run():
    prefill = Prefill(loaded_tiny("llama"), prompt_of(41))
    assert prefill.share(10) == 0.25
    prefill.run(10)
    assert [prefill.share(size) for size in (15, 30, 31)] == [0.5, 1.0, 1.0]
    prefill.run(30)
    assert not prefill.completes_with(0)
    assert prefill.completes_with(1)
    assert prefill.share(1) == 1.0
