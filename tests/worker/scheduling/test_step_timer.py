import pytest

from mlx_dp.worker.scheduling.step_timer import StepTime, StepTimer


def test_a_step_is_timed_when_the_next_call_returns() -> None:
    timer = StepTimer()
    assert timer.returned(10.0, 10.1, prefilled=32, decoded=0, blocks=False) is None
    first = timer.returned(10.2, 11.0, prefilled=0, decoded=1, blocks=False)
    assert first == StepTime(duration_s=1.0, prefilled=32, decoded=0)
    second = timer.returned(11.1, 11.5, prefilled=0, decoded=1, blocks=False)
    assert second == StepTime(duration_s=0.5, prefilled=0, decoded=1)


def test_idle_time_counts_for_no_step() -> None:
    timer = StepTimer()
    timer.returned(0.0, 0.1, prefilled=32, decoded=0, blocks=False)
    timer.idle()
    assert timer.returned(100.0, 100.1, prefilled=0, decoded=1, blocks=False) is None
    timed = timer.returned(100.2, 100.5, prefilled=0, decoded=1, blocks=False)
    assert timed == StepTime(duration_s=0.5, prefilled=0, decoded=1)


def test_a_step_that_launched_nothing_teaches_nothing() -> None:
    timer = StepTimer()
    timer.returned(0.0, 1.0, prefilled=0, decoded=0, blocks=False)
    assert timer.returned(1.0, 2.0, prefilled=0, decoded=1, blocks=False) is None


def test_a_step_whose_launch_blocks_is_timed_by_its_own_call() -> None:
    timer = StepTimer()
    first = timer.returned(10.0, 10.5, prefilled=32, decoded=1, blocks=True)
    assert first == StepTime(duration_s=0.5, prefilled=32, decoded=1)
    second = timer.returned(10.6, 10.75, prefilled=0, decoded=1, blocks=True)
    assert second == StepTime(duration_s=0.25, prefilled=0, decoded=1)
    assert timer.returned(10.8, 11.0, prefilled=0, decoded=0, blocks=True) is None
    timer.idle()
    third = timer.returned(50.0, 50.5, prefilled=4, decoded=0, blocks=True)
    assert third == StepTime(duration_s=0.5, prefilled=4, decoded=0)


def test_tokens_of_a_step_that_blocks_are_not_under_way_when_it_returns() -> None:
    lazy, blocking = StepTimer(), StepTimer()
    for timer in (lazy, blocking):
        timer.returned(0.0, 1.0, prefilled=32, decoded=0, blocks=timer is blocking)
    assert (lazy.prefilling, blocking.prefilling) == (32, 0)


def test_a_device_that_begins_to_block_is_not_taken_at_its_word_for_two_steps() -> None:
    timer = StepTimer()
    timer.returned(0.0, 0.1, prefilled=0, decoded=1, blocks=False)
    # The step before ends in this call, and so does its own, nearly.
    assert timer.returned(0.1, 0.9, prefilled=64, decoded=1, blocks=True) is None
    own = timer.returned(0.9, 1.15, prefilled=0, decoded=1, blocks=True)
    assert own == StepTime(duration_s=pytest.approx(0.25), prefilled=0, decoded=1)


def test_a_device_that_blocks_no_more_tells_nothing_of_a_step_that_was_told_of() -> None:
    timer = StepTimer()
    timer.returned(0.0, 0.5, prefilled=64, decoded=1, blocks=True)
    assert timer.returned(0.5, 0.52, prefilled=0, decoded=1, blocks=False) is None
    own = timer.returned(0.52, 0.77, prefilled=0, decoded=1, blocks=False)
    assert own == StepTime(duration_s=pytest.approx(0.25), prefilled=0, decoded=1)
