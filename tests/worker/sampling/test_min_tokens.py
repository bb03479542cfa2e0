"""Stop tokens are masked exactly while the output is too short."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.proto.messages.grammar import Grammar, GrammarKind
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.sampling.sampler import Sampler
from tests.support.batches.sampling_reference import VOCAB, drawn, engine_requests, random_logits

pytestmark = pytest.mark.mlx

GREEDY = SamplingParams(temperature=0.0)
LOGITS = [1.0, 5.0, 3.0, 4.0]
"""The best are 1, then 3, then 2."""


def request(
    params: SamplingParams,
    *,
    stops: tuple[int, ...] = (1,),
    prompt: int = 3,
    output_ids: tuple[int, ...] = (),
    grammar: Grammar | None = None,
) -> EngineRequest:
    return EngineRequest(
        prompt_ids=(0,) * prompt,
        output_ids=output_ids,
        max_tokens=100,
        params=params,
        grammar=grammar,
        stop_token_ids=stops,
    )


def answer(each: EngineRequest, num_tokens: int) -> list[int]:
    """Greedy draws, from the request's present position."""
    sampler = Sampler(len(LOGITS))
    sampler.set_rows([0], [each])
    start = each.prefill_tokens
    steps = [sampler.draw(mx.array([LOGITS]), [start + at]) for at in range(num_tokens)]
    return [int(step.tokens.item()) for step in steps]


@pytest.mark.parametrize("least", [0, 1, 2, 5])
def test_a_stop_token_is_drawn_behind_the_least_at_the_earliest(least):
    found = answer(request(replace(GREEDY, min_tokens=least)), 6)
    assert found == [3] * least + [1] * (6 - least)


@pytest.mark.parametrize("emitted", range(5))
def test_tokens_of_an_earlier_owner_count(emitted):
    each = request(replace(GREEDY, min_tokens=3), output_ids=(2,) * emitted)
    missing = max(0, 3 - emitted)
    assert answer(each, 4) == [3] * missing + [1] * (4 - missing)


def test_all_stop_tokens_are_masked_and_those_beyond_the_logits_are_none():
    params = replace(GREEDY, min_tokens=2)
    assert answer(request(params, stops=(1, 3)), 3) == [2, 2, 1]
    assert answer(request(params, stops=(1, 4, 2**31 - 1)), 3) == [3, 3, 1]
    assert answer(request(params, stops=(7,)), 3) == [1, 1, 1]
    assert answer(request(params, stops=()), 3) == [1, 1, 1]


def test_no_bias_and_no_penalty_brings_one_back():
    params = replace(
        GREEDY,
        min_tokens=2,
        logit_bias=((1, 100.0),),
        presence_penalty=-2.0,
        repetition_penalty=0.1,
    )
    assert 1 not in answer(request(params), 2)


def test_rows_with_a_grammar_are_left_to_its_masks():
    grammar = Grammar(kind=GrammarKind.REGEX, text="a")
    assert answer(request(replace(GREEDY, min_tokens=2), grammar=grammar), 3) == [1, 1, 1]


def test_rows_that_become_long_enough_leave_the_others_masked():
    rows = [request(replace(GREEDY, min_tokens=least)) for least in (1, 3, 0, 2)]
    sampler = Sampler(len(LOGITS))
    sampler.set_rows(range(4), rows)
    logits = mx.array([LOGITS] * 4)
    steps = [sampler.draw(logits, [3 + at] * 4).tokens.tolist() for at in range(4)]
    assert steps == [[3, 3, 1, 3], [1, 3, 1, 3], [1, 3, 1, 1], [1, 1, 1, 1]]


def test_the_log_probabilities_are_the_models_own():
    sampler = Sampler(len(LOGITS))
    sampler.set_rows([0], [request(replace(GREEDY, min_tokens=1, logprobs=1))])
    found = sampler.draw(mx.array([LOGITS]), [3]).read_logprobs()[0]
    assert found.top[0][0] == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(
            engine_requests(),
            st.integers(0, 6),
            st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**16),
)
def test_every_row_draws_what_the_slow_reference_draws_with_the_stops_left_out(rows, seed):
    rng = np.random.default_rng(seed)
    requests = [
        replace(each, params=replace(each.params, min_tokens=least), stop_token_ids=tuple(stops))
        for each, least, stops in rows
    ]
    sampler = Sampler(VOCAB)
    sampler.set_rows(range(len(requests)), requests)
    answers = [list(each.output_ids) for each in requests]
    for _ in range(5):
        logits = random_logits(rng, len(requests))
        at = [len(r.prompt_ids) + len(a) for r, a in zip(requests, answers, strict=True)]
        found = sampler.draw(mx.array(logits), at).tokens.tolist()
        for row, each in enumerate(requests):
            own = logits[row].copy()
            if len(answers[row]) < each.params.min_tokens:
                own[list(each.stop_token_ids)] = -np.inf
            assert found[row] == drawn(own, each, answers[row], at[row]), (row, each)
            answers[row].append(found[row])
