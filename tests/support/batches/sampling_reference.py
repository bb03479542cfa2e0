"""The sampling of one token, written out slowly for one row in numpy."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.sampling.hashing import draw_key

VOCAB = 24


def edited(logits: np.ndarray, request: EngineRequest, answer: Sequence[int]) -> np.ndarray:
    """Bias, then penalties; ``answer``: all generated tokens so far."""
    params = request.params
    result = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        result[token] += bias
    for token in {*request.prompt_ids, *answer}:
        if result[token] > 0:
            result[token] /= params.repetition_penalty
        else:
            result[token] *= params.repetition_penalty
    for token in answer:
        result[token] -= params.frequency_penalty
    for token in set(answer):
        result[token] -= params.presence_penalty
    return result


def kept(scaled: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens that may be drawn, from logits that are already divided by the temperature."""
    order = np.argsort(-scaled, kind="stable")
    ranked = order[: top_k or len(order)]
    weights = np.exp(scaled[ranked] - scaled[order[0]])
    weights /= weights.sum()
    mass = 0.0
    last = order[0]
    for token, weight in zip(ranked, weights, strict=True):
        if mass >= top_p and top_p < 1.0:
            break
        last = token
        mass += weight
    allowed = scaled >= scaled[last]
    if min_p:
        allowed &= scaled >= scaled[order[0]] + np.log(min_p)
    return np.asarray(allowed)


def drawn(logits: np.ndarray, request: EngineRequest, answer: Sequence[int], position: int) -> int:
    """The token that this request draws at this position, given its output so far."""
    params = request.params
    result = edited(logits, request, answer)
    if params.greedy:
        return int(np.argmax(result))
    scaled = result / params.temperature
    allowed = kept(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    key = mx.array(draw_key(params.seed, position), dtype=mx.uint32)
    noise = np.array(mx.random.gumbel((len(logits),), key=key), dtype=np.float64)
    return int(np.argmax(np.where(allowed, scaled + noise, -np.inf)))


tokens = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw: st.DrawFn, *, logprobs: bool = False) -> SamplingParams:
    """Any mix of sampling parameters, with neutral values often."""
    biases = draw(st.dictionaries(tokens, st.sampled_from([-100.0, -2.5, 0.5, 3.0]), max_size=3))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 10, VOCAB, 5000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.31, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.013, 0.2, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.4, 1.1])),
        logit_bias=tuple(biases.items()),
        seed=draw(st.integers(0, 2**63 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])) if logprobs else None,
    )


@st.composite
def engine_requests(draw: st.DrawFn, *, logprobs: bool = False) -> EngineRequest:
    return EngineRequest(
        prompt_ids=tuple(draw(st.lists(tokens, min_size=1, max_size=5))),
        output_ids=tuple(draw(st.lists(tokens, max_size=4))),
        max_tokens=100,
        params=draw(sampling_params(logprobs=logprobs)),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int = VOCAB) -> np.ndarray:
    """Logits about as far apart as a model's."""
    return 3.0 * rng.standard_normal((rows, vocab), dtype=np.float32)
