"""Sampling parameters: neutral defaults, and bounds that hold on both sides."""

import math
from dataclasses import asdict

import msgspec
import pytest

from mlx_dp.proto.messages.sampling_params import MAX_LOGIT_BIAS, MAX_SEED, SamplingParams


def received(**fields) -> SamplingParams:
    return msgspec.convert(fields, SamplingParams)


def test_the_defaults_change_nothing_about_the_distribution():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    assert (params.frequency_penalty, params.logit_bias, params.logprobs) == (0.0, (), None)
    assert not params.greedy


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-300, 9e-6])
def test_temperatures_that_leave_float32_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("temperature", 0.0, 100.0),
        ("top_k", 0, 2**31 - 1),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("seed", 0, MAX_SEED),
        ("logprobs", 0, 20),
    ],
)
def test_bounds_are_inclusive_and_hold_on_arrival(field, low, high):
    for value in (low, high):
        assert getattr(received(**{field: value}), field) == value
    beyond = [low - 1, high + 1]
    if isinstance(low, float):
        beyond = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]
    for value in beyond:
        with pytest.raises(msgspec.ValidationError):
            received(**{field: value})


@pytest.mark.parametrize(("field", "high"), [("top_p", 1.0), ("repetition_penalty", 100.0)])
def test_zero_is_out_of_range_where_it_would_leave_nothing(field, high):
    assert getattr(received(**{field: high}), field) == high
    for value in (0.0, -1.0, math.nextafter(high, math.inf)):
        with pytest.raises(msgspec.ValidationError):
            received(**{field: value})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [name for name, value in asdict(SamplingParams()).items()
                                   if isinstance(value, float)])  # fmt: skip
def test_numbers_that_are_not_finite_are_refused_where_they_are_made(field, bad):
    with pytest.raises(ValueError, match="not a finite number"):
        SamplingParams(**{field: bad})
    with pytest.raises(msgspec.ValidationError):
        received(**{field: bad})


def test_biases_are_bounded_in_number_and_size():
    full = [[token, -100.0] for token in range(MAX_LOGIT_BIAS)]
    assert len(received(logit_bias=full).logit_bias) == MAX_LOGIT_BIAS
    for bad in ([*full, [0, 0.0]], [[1, 100.5]], [[-1, 0.0]], [[1]], [[1, math.nan]]):
        with pytest.raises(msgspec.ValidationError):
            received(logit_bias=bad)
