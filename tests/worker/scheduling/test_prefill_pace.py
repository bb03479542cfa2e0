"""The pace of prompt tokens: known before it is needed, and rather too slow than too fast."""

import pytest

from mlx_dp.worker.scheduling.prefill_pace import PrefillPace


def test_nothing_is_known_before_a_step_with_enough_tokens() -> None:
    pace = PrefillPace()
    assert pace.token_s is None
    pace.observe(5.0, 31)
    assert pace.token_s is None
    pace.observe(0.512, 512)
    assert pace.token_s == pytest.approx(0.001)


def test_a_slower_step_counts_in_full_and_a_faster_one_by_half() -> None:
    pace = PrefillPace()
    pace.observe(1.0, 100)
    pace.observe(3.0, 100)
    assert pace.token_s == pytest.approx(0.03)
    pace.observe(1.0, 100)
    assert pace.token_s == pytest.approx(0.02)


def test_one_step_that_was_stopped_in_between_does_not_set_the_pace() -> None:
    pace = PrefillPace()
    pace.observe(1.0, 100)
    pace.observe(3600.0, 100)
    assert pace.token_s == pytest.approx(0.04)
