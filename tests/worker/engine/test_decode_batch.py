"""Rows draw from lazy tokens, leave when they are done, and keep their prefixes on request."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save, SegmentPart
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.engine.decode_batch import DecodeBatch, LaunchedStep
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.grammar.compiler import GrammarCompiler
from mlx_dp.worker.grammar.masks import GrammarMasks
from tests.support.batches.tiny_batches import KINDS, form_of, loaded_tiny, prefilled, prompt_of
from tests.support.models.oracle import Ties, assert_greedy

pytestmark = pytest.mark.mlx

GREEDY = SamplingParams(temperature=0.0)


class Rows:
    """A batch and the tokens of its requests."""

    def __init__(self, name: str = "llama") -> None:
        self.loaded = loaded_tiny(name)
        self.caches = DecodeCaches(self.loaded, form_of(name))
        self.segments = Segments()
        vocab_size = self.loaded.shape.vocab_size
        # No request here has a grammar, so the tokenizer is never loaded.
        grammars = GrammarMasks(GrammarCompiler(Path("nowhere"), vocab_size))
        self.batch = DecodeBatch(self.caches, self.segments, grammars, vocab_size=vocab_size)
        self.answers: dict[int, list[int]] = {}

    def join(
        self, key: int, prompt: Sequence[int], *, answer: Sequence[int] = (), max_tokens: int = 6
    ) -> None:
        request = EngineRequest(
            prompt_ids=tuple(prompt),
            output_ids=tuple(answer),
            max_tokens=max_tokens,
            params=GREEDY,
        )
        prefill = prefilled(self.loaded, [*prompt, *answer])
        self.batch.join(key, request, prefill, room=len(prompt) + max_tokens)
        self.answers[key] = list(answer)

    def launch(self) -> LaunchedStep:
        self.batch.drop_done()
        self.batch.launch_forward()
        return self.batch.launch_sampling()

    def read(self, launched: LaunchedStep) -> None:
        for key, token, _ in launched.read():
            self.answers[key].append(token)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.read(self.launch())

    def expect_greedy(self, key: int, prompt: Sequence[int]) -> None:
        ties = Ties()
        answer = self.answers[key]
        assert_greedy(self.loaded.model, prompt, answer, max_tokens=len(answer), ties=ties)
        assert not ties.found, ties.report()


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_that_mlx_lm_gives_alone(name):
    rows = Rows(name)
    prompts = {key: prompt_of(length, key) for key, length in enumerate((9, 1, 30))}
    for key, prompt in prompts.items():
        rows.join(key, prompt)
        rows.run(1)
    rows.run(3)
    for key, prompt in prompts.items():
        rows.expect_greedy(key, prompt)


@pytest.mark.parametrize("lengths", [(9,), (9, 3, 20)])
def test_a_step_can_be_launched_on_unread_tokens(lengths):
    rows = Rows()
    for key, length in enumerate(lengths):
        rows.join(key, prompt_of(length, key))
    for launched in [rows.launch() for _ in range(4)]:
        rows.read(launched)
    for key, length in enumerate(lengths):
        rows.expect_greedy(key, prompt_of(length, key))


def test_a_joining_row_begins_with_its_own_last_token_beside_lazy_ones():
    rows = Rows()
    rows.join(0, prompt_of(9))
    first = rows.launch()
    rows.join(1, prompt_of(5, 1))
    second = rows.launch()
    rows.read(first)
    rows.read(second)
    rows.run(2)
    for key, length in ((0, 9), (1, 5)):
        rows.expect_greedy(key, prompt_of(length, key))


def test_an_answer_goes_on_behind_what_an_earlier_owner_drew():
    rows = Rows()
    rows.join(0, prompt_of(9))
    rows.run(4)
    rows.join(1, prompt_of(9), answer=rows.answers[0][:2], max_tokens=4)
    rows.run(2)
    assert rows.answers[1] == rows.answers[0][:4]
    assert rows.batch._rows[1].done


def test_a_row_whose_budget_is_spent_draws_no_more_and_goes_before_the_next_step():
    rows = Rows()
    rows.join(0, prompt_of(9), max_tokens=2)
    rows.join(1, prompt_of(5, 1))
    rows.run(2)
    assert len(rows.batch) == 1
    assert rows.caches.used_tokens == 10 + 6
    assert rows.launch().keys == (1,)
    assert rows.caches.used_tokens == 7


def test_a_row_leaves_before_the_next_step_and_the_last_one_at_once():
    rows = Rows()
    rows.join(0, prompt_of(9))
    rows.join(1, prompt_of(5, 1))
    rows.run(1)
    rows.batch.leave(0)
    assert (len(rows.batch), rows.caches.used_tokens) == (1, 9 + 5)
    rows.run(1)
    assert rows.caches.used_tokens == 6
    rows.batch.leave(1)
    assert (len(rows.batch), rows.caches.nbytes) == (0, 0)
    rows.batch.leave(1)


def test_sampling_without_a_forward_pass_is_our_bug():
    with pytest.raises(AssertionError, match="launch_forward"):
        Rows().batch.launch_sampling()


@pytest.mark.parametrize("spent", [True, False], ids=["budget spent", "stopped"])
@pytest.mark.parametrize("others", [True, False], ids=["others go on", "last of all"])
@pytest.mark.parametrize("name", KINDS)
def test_a_next_turn_goes_on_from_what_a_row_left(name, others, spent):
    rows = Rows(name)
    prompt = prompt_of(21)
    if others:
        rows.join(1, prompt_of(30, 1), max_tokens=20)
    rows.join(0, prompt, max_tokens=5 if spent else 50)
    rows.run(5)
    # The fifth token has been drawn and not fed.
    history = [*prompt, *rows.answers[0][:4]]
    snapshot = 7 if rows.loaded.layout.stateful else None
    assert rows.batch.save_prefix(0, (Save(1, 0, 10), Save(2, 10, len(history))), snapshot)
    rows.batch.leave(0)
    rows.batch.drop_done()
    prefix = CachedPrefix(
        pieces=(SegmentPart(1, 10), SegmentPart(2, len(history) - 10)),
        num_tokens=len(history),
        snapshot=snapshot,
    )
    turn = [*history, rows.answers[0][4], *prompt_of(9, 3)]
    found = prefilled(rows.loaded, turn, prefix=prefix, segments=rows.segments).content()
    cold = prefilled(rows.loaded, turn).content()
    assert found is not None and cold is not None
    pairs = [
        (a, b)
        for ours, theirs in zip(found.kv, cold.kv, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    pairs += zip(found.recent.arrays(), cold.recent.arrays(), strict=True)
    for ours, theirs in pairs:
        atol = 1e-4 * max(1.0, float(mx.abs(theirs).max()))
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=atol)
    if others:
        rows.run(3)
        rows.expect_greedy(1, prompt_of(30, 1))


def test_a_spent_row_with_a_prefix_to_keep_waits_while_another_goes():
    rows = Rows("qwen3_next")
    for key in range(2):
        rows.join(key, prompt_of(9, key), max_tokens=2)
    rows.run(2)
    for key in range(2):
        assert rows.batch.save_prefix(key, (Save(key, 0, 10),), key)
        rows.batch.leave(key)
        assert rows.segments.has_snapshot(key)
        assert rows.caches.used_tokens == 10 * (1 - key)
    assert rows.caches.nbytes == 0


def test_nothing_is_kept_unasked_and_an_unknown_row_is_told_from_one_that_is_here():
    rows = Rows("qwen3_next")
    rows.join(0, prompt_of(9), max_tokens=2)
    assert not rows.batch.save_prefix(5, (), 1)
    rows.run(2)
    assert rows.segments.nbytes == 0
    rows.batch.drop_done()
    assert rows.segments.nbytes == 0
    assert not rows.batch.save_prefix(0, (), 1)


def test_a_state_that_was_never_written_leaves_no_snapshot():
    rows = Rows("qwen3_next")
    rows.join(0, [7])
    rows.batch.save_prefix(0, (), 3)
    rows.batch.leave(0)
    assert not rows.segments.has_snapshot(3)
