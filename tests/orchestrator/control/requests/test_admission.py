"""Refusals before the queue."""

from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import Generation, RefusedError
from mlx_dp.orchestrator.control.requests.admission import (
    certain_max_tokens,
    check_generation,
    check_rank,
)
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.sampling_params import SamplingParams
from tests.support.control.fake_worker import VOCAB, generation

LIMITS = AdmissionLimits(context_length=100, pool_tokens=50)


def check(wanted: Generation, *, strict: bool) -> None:
    certain_max_tokens(wanted, LIMITS, strict=strict)
    check_generation(wanted, VOCAB)


def refusal(wanted: Generation, *, strict: bool = False) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        check(wanted, strict=strict)
    return refused.value


def test_what_fits_passes_with_the_length_that_it_asks_for() -> None:
    wanted = generation((1, VOCAB - 1), 49, stop=(5,))
    check_generation(wanted, VOCAB)
    for strict in (False, True):
        assert certain_max_tokens(wanted, LIMITS, strict=strict) == 49
        assert certain_max_tokens(generation((1,) * 50, None), LIMITS, strict=strict) is None


@pytest.mark.parametrize("asked", [50, 60, 2**62])
def test_an_answer_beyond_what_is_left_gets_what_its_owner_has_unless_that_is_refused(
    asked: int,
) -> None:
    wanted = generation((1, 2), asked)
    assert certain_max_tokens(wanted, LIMITS, strict=False) is None
    refused = refusal(wanted, strict=True)
    assert (refused.param, refused.code) == ("max_tokens", "context_length_exceeded")
    assert f"2 in the messages, {asked} in the completion" in str(refused)


@pytest.mark.parametrize(
    ("wanted", "param", "text"),
    [
        (generation(()), "prompt", "empty"),
        (generation((1,) * 99, 2), "prompt", "resulted in 99 tokens"),
        (generation((1,) * 51, 2), "prompt", "One worker holds 50 KV tokens"),
        (generation((1,), 0), "max_tokens", "at least 1"),
        (generation((VOCAB,)), "prompt", f"token id {VOCAB} does not exist"),
        (generation((-1, 5)), "prompt", "token id -1"),
        (generation(stop=(2**31,)), "stop_token_ids", "does not exist"),
        (generation(stop=(-1,)), "stop_token_ids", "does not exist"),
        (generation(stop=(1,) * 257), "stop_token_ids", "at most 256"),
    ],
)
def test_what_could_never_run_is_refused_with_its_field(
    wanted: Generation, param: str, text: str
) -> None:
    refused = refusal(wanted)
    assert refused.param == param
    assert text in str(refused)


def test_a_stop_token_that_the_model_cannot_draw_is_harmless() -> None:
    # Some models name an end token beyond the width of their logits.
    check_generation(generation(stop=(VOCAB, 2**31 - 1)), VOCAB)


def test_a_bias_on_a_token_that_does_not_exist_is_refused() -> None:
    params = SamplingParams(logit_bias=((VOCAB, 1.0),))
    assert refusal(replace(generation(), params=params)).param == "logit_bias"


def test_parameters_that_break_the_protocol_never_reach_a_worker() -> None:
    params = SamplingParams(temperature=1e9)
    assert "100" in str(refusal(replace(generation(), params=params)))


def test_ranks_are_those_that_exist() -> None:
    for rank in (None, 0, 1):
        check_rank(rank, 2)
    for rank in (-1, 2):
        with pytest.raises(RefusedError, match="use 0 to 1"):
            check_rank(rank, 2)
