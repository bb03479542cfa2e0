"""Correlated crashes: workers that die together, without a single request to blame."""

import pytest

from mlx_dp.orchestrator.control.requests.correlated_crashes import (
    CORRELATION_WINDOW_S,
    CorrelatedCrashes,
)

MOVED = 7
"""A request that was running at some of the deaths."""


def deaths(*times_and_requests: tuple[float, set[int]]) -> CorrelatedCrashes:
    recent = CorrelatedCrashes()
    for time, requests in times_and_requests:
        recent.add(frozenset(requests), time)
    return recent


def test_two_deaths_with_a_third_elsewhere_are_an_accident() -> None:
    assert deaths((0.0, {MOVED}), (0.01, {1}), (0.02, {MOVED})).exonerates(MOVED)
    assert deaths((0.0, set()), (0.01, {MOVED}), (0.02, {MOVED})).exonerates(MOVED)


@pytest.mark.parametrize(
    "found",
    [
        deaths((0.0, {MOVED})),
        deaths((0.0, {1}), (0.0, {MOVED})),
        deaths((0.0, {MOVED}), (0.02, {MOVED})),
        deaths((0.0, {MOVED, 1}), (0.01, {MOVED}), (0.02, {MOVED, 2})),
    ],
    ids=["one", "its first", "no other", "at each"],
)
def test_a_request_at_each_death_is_not_spared(found: CorrelatedCrashes) -> None:
    assert not found.exonerates(MOVED)


def test_an_earlier_accident_excuses_no_request() -> None:
    late = CORRELATION_WINDOW_S + 0.01
    assert not deaths((0.0, {1}), (late, {MOVED}), (late + 0.01, {MOVED})).exonerates(MOVED)
    assert not deaths((0.0, {MOVED}), (late, {1}), (late + 0.01, {MOVED})).exonerates(MOVED)
