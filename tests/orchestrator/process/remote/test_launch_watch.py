from mlx_dp.orchestrator.process.remote.launch_watch import LaunchWatch

RANKS = frozenset({0, 1})


def test_a_rank_that_had_joined_must_not_stay_away() -> None:
    watch = LaunchWatch(RANKS, patience_s=10.0)
    assert watch.update({0, 1}, 0.0) is None
    assert watch.update({0}, 1.0) is None
    assert watch.update({0}, 11.0) is None
    assert watch.update({0}, 11.1) == 1


def test_one_that_comes_back_in_time_is_counted_anew() -> None:
    watch = LaunchWatch(RANKS, patience_s=10.0)
    watch.update({0, 1}, 0.0)
    watch.update({0}, 1.0)
    watch.update({0, 1}, 9.0)
    assert watch.update({0}, 12.0) is None
    assert watch.update({0}, 22.0) is None


def test_one_that_never_came_has_its_own_words() -> None:
    watch = LaunchWatch(RANKS, patience_s=10.0)
    assert watch.update({0}, 0.0) is None
    assert watch.update({0}, 1000.0) is None
