"""Rounding is the device's own difference, and differs between prompts; a fault does not."""

import math

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.worker.loading.rounding import (
    FLOAT32_TOLERANCE,
    HALF_TOLERANCE,
    MARGIN,
    SHARE_OF_NEAREST,
    Comparison,
    Tolerance,
    Trial,
    compare,
    differences,
)

pytestmark = pytest.mark.mlx


def compared(
    *trials: tuple[float, ...],
    noise: float = 0.0,
    nearest: float = 1.0,
    tolerance: Tolerance = FLOAT32_TOLERANCE,
) -> Comparison:
    """``trials``: the difference at each place; the last one stands for those that follow."""
    return compare(
        lambda number: Trial(
            places=trials[min(number, len(trials) - 1)], tolerance=tolerance, nearest=nearest
        ),
        lambda _: noise,
    )


def test_one_prompt_set_settles_what_is_within_the_least_tolerance():
    def never(_: int) -> float:
        raise AssertionError("nothing was to be measured")

    def first(number: int) -> Trial:
        assert number == 0, "one trial does"
        return Trial(places=(1e-3, 0.0), tolerance=FLOAT32_TOLERANCE, nearest=1.0)

    assert compare(first, never) == Comparison(worst=1e-3, allowed=1e-3)


@pytest.mark.parametrize(("noise", "agrees"), [(0.0, False), (1e-3, True)])
def test_what_the_device_shows_by_itself_is_allowed(noise, agrees):
    assert compared((2e-3, 0.0), noise=noise).agrees == agrees


def test_a_tie_that_is_decided_otherwise_at_one_place_of_one_prompt_is_no_fault():
    assert compared((0.5, 0.0), (0.0, 0.0), (0.0, 0.5)).agrees


def test_a_fault_at_one_place_of_all_prompts_is_found_whatever_the_noise():
    found = compared((0.0, 0.5), (0.0, 0.4), (0.0, 0.6), noise=0.4, tolerance=HALF_TOLERANCE)
    assert found == Comparison(worst=0.5, allowed=HALF_TOLERANCE.most)


def test_noise_that_is_no_number_excuses_nothing_that_is_none():
    assert not compared((math.inf,), noise=math.inf).agrees


def test_measured_noise_is_bounded_below_above_and_by_what_parts_two_rows():
    tolerance = Tolerance(least=0.01, most=0.5)
    assert tolerance.with_noise(0.0) == 0.01
    assert tolerance.with_noise(0.1) == MARGIN * 0.1
    assert tolerance.with_noise(1.0) == 0.5
    assert tolerance.with_noise(0.1, nearest=0.4) == SHARE_OF_NEAREST * 0.4
    assert tolerance.with_noise(0.1, nearest=0.0) == 0.01


def test_differences_are_told_by_row_and_step():
    whole = [mx.array([[0.0, 4.0], [1.0, 0.0]]), mx.array([[2.0, 0.0], [0.0, 1.0]])]
    other = [mx.array([[0.0, 4.0], [1.0, 2.0]]), mx.array([[2.0, mx.nan], [0.0, 1.0]])]
    assert differences(whole, other) == [0.0, 0.5, math.inf, 0.0]
