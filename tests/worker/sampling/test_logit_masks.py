"""Only rows with a grammar are masked, and for any logits an allowed token is drawn."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.grammar.masks import RowMasks
from mlx_dp.worker.sampling.logit_masks import apply_masks
from mlx_dp.worker.sampling.sampler import SampledStep, Sampler
from tests.support.batches.sampling_reference import VOCAB, drawn, engine_requests, random_logits

pytestmark = pytest.mark.mlx

GREEDY = SamplingParams(temperature=0.0)


def masks_of(rows: dict[int, set[int]], vocab: int = VOCAB) -> RowMasks:
    flags = np.zeros((len(rows), -(-vocab // 32) * 32), dtype=np.uint8)
    for at, tokens in enumerate(rows.values()):
        flags[at, list(tokens)] = 1
    return RowMasks(tuple(rows), np.packbits(flags, axis=1, bitorder="little").view(np.int32))


def request(params: SamplingParams) -> EngineRequest:
    return EngineRequest(prompt_ids=(0,), output_ids=(), max_tokens=9, params=params)


def sample(params: list[SamplingParams], logits: np.ndarray, masks: RowMasks) -> SampledStep:
    sampler = Sampler(logits.shape[-1])
    sampler.set_rows(range(len(params)), [request(each) for each in params])
    return sampler.draw(mx.array(logits), [1] * len(params), masks)


def tokens(step: SampledStep) -> list[int]:
    found: list[int] = step.tokens.tolist()  # type: ignore[assignment]
    return found


masked_rows = st.lists(
    st.tuples(engine_requests(), st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(rows=masked_rows, seed=st.integers(0, 2**16))
def test_a_masked_row_draws_what_it_would_if_other_tokens_were_impossible(rows, seed):
    requests = [each for each, _ in rows]
    masks = masks_of({row: allowed for row, (_, allowed) in enumerate(rows) if allowed})
    logits = random_logits(np.random.default_rng(seed), len(rows))
    sampler = Sampler(VOCAB)
    sampler.set_rows(range(len(rows)), requests)
    found = tokens(sampler.draw(mx.array(logits), [3] * len(rows), masks if masks.rows else None))
    for row, (each, allowed) in enumerate(rows):
        own = logits[row].copy()
        if allowed:
            own[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
        assert found[row] == drawn(own, each, list(each.output_ids), 3)
        assert not allowed or found[row] in allowed


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_every_bit_masks_its_own_token(vocab):
    logits = np.zeros((2, vocab), dtype=np.float32)
    for token in {0, vocab // 2, vocab - 1}:
        found = np.array(apply_masks(mx.array(logits), masks_of({1: {token}}, vocab)))
        assert np.array_equal(found[0], logits[0])
        assert list(np.flatnonzero(np.isfinite(found[1]))) == [token]


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, -3e38])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.01, top_p=0.9, seed=3)])
def test_an_allowed_token_is_drawn_whatever_the_model_yields(value, params):
    logits = np.full((1, VOCAB), value, dtype=np.float32)
    punished = replace(params, repetition_penalty=1.5, presence_penalty=2.0)
    for each in (params, punished):
        assert tokens(sample([each], logits, masks_of({0: {17}}))) == [17]


def test_no_bias_brings_a_masked_token_back():
    params = replace(GREEDY, logit_bias=((3, 100.0),))
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    assert tokens(sample([params], logits, masks_of({0: {5}}))) == [5]


@pytest.mark.parametrize("others", [0, 2])
def test_log_probabilities_are_the_models_own(others):
    params = replace(GREEDY, logprobs=2)
    logits = random_logits(np.random.default_rng(1), 1 + others)
    worst = int(np.argmin(logits[0]))
    step = sample([params] + [GREEDY] * others, logits, masks_of({0: {worst}}))
    assert tokens(step)[0] == worst
    own = step.read_logprobs()[0]
    exact = logits[0] - np.log(np.exp(logits[0]).sum())
    assert own.logprob == pytest.approx(exact[worst], abs=1e-4)
    assert own.top[0][0] == int(np.argmax(logits[0]))
