from mlx_dp.orchestrator.process.repeated_words import RepeatedWords


def test_a_sentence_is_said_again_after_a_long_time_or_a_change() -> None:
    words = RepeatedWords(600.0)
    assert words.worth_saying("a", 0.0)
    assert not words.worth_saying("a", 599.0)
    assert words.worth_saying("b", 599.0)
    assert words.worth_saying("a", 600.0)
    words.forget()
    assert words.worth_saying("a", 601.0)
