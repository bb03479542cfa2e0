"""Penalties follow their definitions while rows come, go and change places."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.sampling.penalties import Penalties
from tests.support.batches.sampling_reference import VOCAB, edited, engine_requests, random_logits

pytestmark = pytest.mark.mlx


def request(*prompt: int, output_ids: tuple[int, ...] = (), **params: float) -> EngineRequest:
    return EngineRequest(
        prompt_ids=prompt,
        output_ids=output_ids,
        max_tokens=100,
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def applied(given: EngineRequest, logits: list[float], answer: tuple[int, ...] = ()) -> list[float]:
    penalties = Penalties(len(logits))
    penalties.set_rows([0], [given])
    for token in answer:
        penalties.count(mx.array([token]))
    result: list[list[float]] = penalties.apply(mx.array([logits])).tolist()  # type: ignore[assignment]
    return result[0]


def test_repetition_weakens_prompt_and_answer_on_both_sides_of_zero():
    found = applied(request(0, repetition_penalty=2.0), [4.0, -4.0, 4.0, -4.0], answer=(1,))
    assert found == [2.0, -8.0, 4.0, -4.0]


def test_presence_counts_the_answer_once_and_the_prompt_never():
    found = applied(request(0, presence_penalty=1.5), [1.0, 1.0, 1.0], answer=(1, 1))
    assert found == [1.0, -0.5, 1.0]


def test_frequency_counts_every_token_of_the_answer():
    found = applied(request(0, frequency_penalty=0.5), [1.0, 1.0, 1.0], answer=(1, 1, 2))
    assert found == [1.0, 0.0, 0.5]


def test_tokens_of_an_earlier_owner_count_as_answer():
    given = request(0, output_ids=(1, 1), presence_penalty=1.0, frequency_penalty=0.5)
    assert applied(given, [1.0, 1.0, 1.0], answer=(2,)) == [1.0, -1.0, -0.5]


def test_a_row_without_penalties_is_left_alone_and_so_is_the_callers_array():
    penalties = Penalties(3)
    penalties.set_rows([0, 1], [request(0), request(0, repetition_penalty=2.0)])
    logits = mx.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert penalties.apply(logits).tolist() == [[1.0, 2.0, 3.0], [0.5, 2.0, 3.0]]
    assert logits.tolist() == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]


def test_without_penalised_rows_nothing_is_computed():
    penalties = Penalties(3)
    penalties.set_rows([0], [request(0)])
    logits = mx.ones((1, 3))
    assert penalties.apply(logits) is logits
    assert penalties.arrays() == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(engine_requests(), min_size=1, max_size=5),
    data=st.data(),
    seed=st.integers(0, 2**16),
)
def test_counts_follow_their_row_through_joins_leaves_and_moves(requests, data, seed):
    rng = np.random.default_rng(seed)
    # Biases are the sampler's part.
    answers = {key: list(request.output_ids) for key, request in enumerate(requests)}
    penalties = Penalties(VOCAB)
    for _ in range(4):
        order = data.draw(st.lists(st.sampled_from(sorted(answers)), unique=True, min_size=1))
        penalties.set_rows(order, [requests[key] for key in order])
        for key in answers:
            if key not in order:
                # A row that leaves and comes back is a new one: it starts with its own output.
                answers[key] = list(requests[key].output_ids)
        for _ in range(2):
            logits = random_logits(rng, len(order))
            found = np.array(penalties.apply(mx.array(logits)))
            for row, key in enumerate(order):
                expected = edited(logits[row], _without_bias(requests[key]), answers[key])
                np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)
            drawn = rng.integers(0, VOCAB, len(order))
            penalties.count(mx.array(drawn.astype(np.int32)))
            for key, token in zip(order, drawn, strict=True):
                answers[key].append(int(token))


def _without_bias(given: EngineRequest) -> EngineRequest:
    params = given.params
    return EngineRequest(
        prompt_ids=given.prompt_ids,
        output_ids=given.output_ids,
        max_tokens=given.max_tokens,
        params=SamplingParams(
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        ),
    )
