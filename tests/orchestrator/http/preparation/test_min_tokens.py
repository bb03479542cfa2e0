"""Minimum length of responses: the workers' parameter, and when stop strings count."""

from typing import Any

import pytest

from tests.support.http.http_calls import chat, complete, error, events
from tests.support.http.scripted_service import ScriptedService, says

BOTH = (chat, complete)


def text_of(response: Any) -> str:
    choice = response.json()["choices"][0]
    found: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return found


@pytest.mark.parametrize("send", BOTH)
def test_it_is_a_parameter_of_every_choice(send: Any) -> None:
    service = ScriptedService()
    assert send(service, min_tokens=9, n=3).status_code == 200
    assert [answer.generation.params.min_tokens for answer in service.answers] == [9, 9, 9]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_it_is_at_most_the_largest_length(name: str) -> None:
    found = error(chat(ScriptedService(), min_tokens=11, **{name: 10}), 400)
    assert found["message"] == f"min_tokens: 11 is more than {name} (10): use at most 10"
    for least in (10, 10.0, 0):
        assert chat(ScriptedService(), min_tokens=least, **{name: 10}).status_code == 200
    assert chat(ScriptedService(), min_tokens=11, **{name: -1}).status_code == 200


@pytest.mark.parametrize("value", [-1, 2**20 + 1, 1.5, True, "3"])
def test_it_is_bounded(value: object) -> None:
    assert error(chat(ScriptedService(), min_tokens=value), 400)["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("least", "shown"),
    [
        # The answer is "ab ab ab": a token for each character, and its end.
        (0, "a"),
        (1, "a"),
        # The first stop is complete with the second token, which is too early.
        (2, "ab a"),
        (4, "ab a"),
        (5, "ab ab a"),
        (8, "ab ab ab"),
        (99, "ab ab ab"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_once_it_is_completed_behind_the_least(
    least: int, shown: str, stream: bool
) -> None:
    service = ScriptedService(lambda _: says("ab ab ab"))
    response = chat(service, stop=["b"], min_tokens=least, stream=stream)
    if stream:
        deltas = [e["choices"][0]["delta"].get("content", "") for e in events(response)]
        assert "".join(deltas) == shown
    else:
        assert text_of(response) == shown


def test_a_stop_string_may_begin_before_the_least() -> None:
    service = ScriptedService(lambda _: says("one two three"))
    # " two" has the tokens 4 to 7.
    assert text_of(chat(service, stop=[" two"], min_tokens=6)) == "one"
    assert text_of(chat(service, stop=[" two"], min_tokens=7)) == "one two three"


def test_a_short_stop_string_inside_of_a_longer_one_that_came_too_early_is_passed_over() -> None:
    service = ScriptedService(lambda _: says("xabcabd"))
    # "ab" ends with the third token, and could still become "abd".
    assert text_of(chat(service, stop=["ab", "abd"], min_tokens=3)) == "xabc"
    assert text_of(chat(service, stop=["ab", "abcx"], min_tokens=3)) == "xabc"
    assert text_of(chat(service, stop=["ab", "abc"], min_tokens=3)) == "x"
