"""top_k, top_p and min_p keep the right tokens, in every mix of rows."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.sampling.logit_masks import filter_logits
from tests.support.batches.sampling_reference import kept

pytestmark = pytest.mark.mlx


def allowed(
    logits: list[list[float]], top_k: list[int], top_p: list[float], min_p: list[float]
) -> list[list[bool]]:
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=least)
        for k, p, least in zip(top_k, top_p, min_p, strict=True)
    ]
    found = np.array(filter_logits(mx.array(logits), params))
    assert np.all((found == -np.inf) | (found == np.array(logits, dtype=np.float32)))
    return [[bool(x) for x in row] for row in np.isfinite(found)]


def one(
    logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """The token ids that one row alone keeps."""
    (row,) = allowed([logits], [top_k], [top_p], [min_p])
    return [token for token, stays in enumerate(row) if stays]


HALVES = [float(x) for x in np.log([0.5, 0.25, 0.125, 0.125])]


def test_top_k_keeps_the_best():
    assert one([1.0, 4.0, 2.0, 3.0], top_k=2) == [1, 3]
    assert one([1.0, 4.0, 2.0, 3.0], top_k=1) == [1]
    assert one([1.0, 4.0, 2.0, 3.0], top_k=4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("top_p", "expected"), [(1e-6, [0]), (0.4, [0]), (0.6, [0, 1]), (0.8, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_token_that_crosses_the_mass_and_its_equals(top_p, expected):
    assert one(HALVES, top_p=top_p) == expected


def test_top_p_counts_within_the_top_k():
    # Of the two best, the first has two thirds.
    assert one(HALVES, top_k=2, top_p=0.6) == [0]
    assert one(HALVES, top_k=2, top_p=0.7) == [0, 1]


@pytest.mark.parametrize(("min_p", "expected"), [(1.0, [0]), (0.4, [0, 1]), (0.2, [0, 1, 2, 3])])
def test_min_p_is_relative_to_the_best(min_p, expected):
    assert one(HALVES, min_p=min_p) == expected


def test_neutral_values_keep_even_what_is_hopeless():
    logits = [0.0, -200.0, 3.0, -np.inf]
    assert one(logits) == [0, 1, 2]
    assert allowed([logits, HALVES], [0, 2], [1.0, 0.5], [0.0, 0.3]) == [
        [True, True, True, False],
        [True, False, False, False],
    ]


def test_the_best_token_always_stays():
    assert one([5.0, -300.0, -300.0], top_k=1, top_p=1e-9, min_p=1.0) == [0]
    assert one([0.0, 0.0, 0.0], top_k=1, top_p=1e-9, min_p=1.0) == [0, 1, 2]


row = st.tuples(
    st.sampled_from([0, 1, 2, 7, 16]),
    st.sampled_from([1.0, 1e-9, 0.17, 0.52, 0.83, 0.9991]),
    st.sampled_from([0.0, 0.0031, 0.083, 0.47, 1.0]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(row, min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
    decimals=st.sampled_from([1, 6]),
    spread=st.sampled_from([0.3, 2.0, 12.0]),
)
def test_every_row_keeps_what_it_would_keep_alone(rows, seed, decimals, spread):
    rng = np.random.default_rng(seed)
    # Rounded, so that equal logits happen.
    logits = np.round(spread * rng.standard_normal((len(rows), 16)), decimals).astype(np.float32)
    found = allowed(logits.tolist(), *(list(column) for column in zip(*rows, strict=True)))
    for values, own, (top_k, top_p, min_p) in zip(logits, found, rows, strict=True):
        expected = kept(values.astype(np.float64), top_k=top_k, top_p=top_p, min_p=min_p)
        assert own == expected.tolist()
