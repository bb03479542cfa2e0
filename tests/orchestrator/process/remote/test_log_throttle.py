from mlx_dp.orchestrator.process.remote.log_throttle import LogThrottle


def test_a_sentence_is_said_again_after_a_long_time_or_a_change() -> None:
    words = LogThrottle(600.0)
    assert words.admit("a", 0.0)
    assert not words.admit("a", 599.0)
    assert words.admit("b", 599.0)
    assert words.admit("a", 600.0)
    words.reset()
    assert words.admit("a", 601.0)
