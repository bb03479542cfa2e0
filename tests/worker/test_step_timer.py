from mlx_dp.worker.step_timer import StepTime, StepTimer


def test_a_step_is_timed_when_the_next_call_returns() -> None:
    timer = StepTimer()
    assert timer.returned(10.0, 10.1, prefilled=32, decoded=0) is None
    first = timer.returned(10.2, 11.0, prefilled=0, decoded=1)
    assert first == StepTime(duration_s=1.0, prefilled=32, decoded=0)
    second = timer.returned(11.1, 11.5, prefilled=0, decoded=1)
    assert second == StepTime(duration_s=0.5, prefilled=0, decoded=1)


def test_time_spent_idle_is_nobodys() -> None:
    timer = StepTimer()
    timer.returned(0.0, 0.1, prefilled=32, decoded=0)
    timer.idle()
    assert timer.returned(100.0, 100.1, prefilled=0, decoded=1) is None
    timed = timer.returned(100.2, 100.5, prefilled=0, decoded=1)
    assert timed == StepTime(duration_s=0.5, prefilled=0, decoded=1)


def test_a_step_that_launched_nothing_teaches_nothing() -> None:
    timer = StepTimer()
    timer.returned(0.0, 1.0, prefilled=0, decoded=0)
    assert timer.returned(1.0, 2.0, prefilled=0, decoded=1) is None


def test_a_step_whose_launch_blocks_is_timed_by_its_own_call() -> None:
    timer = StepTimer(blocks=True)
    first = timer.returned(10.0, 10.5, prefilled=32, decoded=1)
    assert first == StepTime(duration_s=0.5, prefilled=32, decoded=1)
    second = timer.returned(10.6, 10.75, prefilled=0, decoded=1)
    assert second == StepTime(duration_s=0.25, prefilled=0, decoded=1)
    assert timer.returned(10.8, 11.0, prefilled=0, decoded=0) is None
    timer.idle()
    third = timer.returned(50.0, 50.5, prefilled=4, decoded=0)
    assert third == StepTime(duration_s=0.5, prefilled=4, decoded=0)


def test_tokens_of_a_step_that_blocks_are_not_under_way_when_it_returns() -> None:
    lazy, blocking = StepTimer(), StepTimer(blocks=True)
    for timer in (lazy, blocking):
        timer.returned(0.0, 1.0, prefilled=32, decoded=0)
    assert (lazy.prefilling, blocking.prefilling) == (32, 0)
