"""HTTP's refusals and the owner's admission use one arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.proto.capacity.request_limits import (
    NEXT_ANSWER_TOKENS,
    AdmissionLimits,
    answer_tokens,
    next_tokens,
    prompt_overflow,
    refusal,
    reserved_tokens,
)
from mlx_dp.proto.fields import MAX_REQUEST_TOKENS

SMALL = AdmissionLimits(context_length=100, pool_tokens=50)
LARGE = AdmissionLimits(context_length=100, pool_tokens=500)

bounds = st.builds(
    AdmissionLimits,
    context_length=st.integers(1, 3000),
    pool_tokens=st.none() | st.integers(1, 3000),
)


def owner_can_run(limits, prompt, answer):
    """The capacity of an idle owner, computed without the module under test."""
    held = prompt + answer - 1
    fits_pool = limits.pool_tokens is None or held <= limits.pool_tokens
    return prompt + answer <= limits.context_length and fits_pool


@given(bounds, st.integers(1, 3000), st.integers(1, 3000))
def test_http_refuses_exactly_what_an_idle_owner_cannot_run(limits, prompt, answer):
    assert (refusal(limits, prompt, answer) is None) == owner_can_run(limits, prompt, answer)


@given(bounds, st.integers(1, 3000), st.integers(1, 3000))
def test_the_most_tokens_are_admitted_and_one_more_is_not(limits, prompt, answer):
    admitted = refusal(limits, prompt, answer) is None
    assert admitted == (prompt + answer <= limits.max_request_tokens)


@given(bounds, st.integers(1, 3000))
def test_the_default_answer_takes_all_that_is_left(limits, prompt):
    answer = answer_tokens(limits, prompt)
    assert answer >= 1
    if prompt < limits.max_request_tokens:
        assert refusal(limits, prompt, answer) is None
        assert refusal(limits, prompt, answer + 1) is not None
    else:
        assert refusal(limits, prompt, answer) is not None


@given(bounds, st.integers(1, 3000), st.integers(1, 2**62))
def test_an_answer_is_cut_to_what_is_left_and_never_longer_than_asked(limits, prompt, asked):
    answer = answer_tokens(limits, prompt, asked)
    assert answer == min(asked, answer_tokens(limits, prompt))
    if prompt < limits.max_request_tokens:
        assert refusal(limits, prompt, answer) is None


def test_the_last_token_needs_no_room():
    assert reserved_tokens(10, 41) == 50
    assert refusal(SMALL, 10, 41) is None
    assert refusal(SMALL, 10, 42) is not None


@pytest.mark.parametrize(
    ("limits", "prompt", "answer", "said"),
    [
        (SMALL, 10, 42, "you requested 52 tokens (10 in the messages, 42 in the completion)."),
        (SMALL, 51, 1, "your messages resulted in 51 tokens,"),
        (SMALL, 60, 41, "your messages resulted in 60 tokens,"),
        (LARGE, 60, 41, "you requested 101 tokens (60 in the messages, 41 in the completion)."),
        (LARGE, 100, 1, "your messages resulted in 100 tokens,"),
    ],
)
def test_what_is_too_long_is_refused_in_the_words_that_clients_look_for(
    limits, prompt, answer, said
):
    message = refusal(limits, prompt, answer)
    most = limits.max_request_tokens
    start = f"This model's maximum context length is {most} tokens. However, "
    assert message.startswith(start + said)
    assert ("One worker holds 50 KV tokens" in message) == (limits is SMALL)
    assert prompt_overflow(limits, "9 tokens").startswith(start + "your messages resulted in 9")


def test_no_request_is_longer_than_a_message_carries():
    endless = AdmissionLimits(context_length=2**31 - 1, pool_tokens=None)
    assert endless.max_request_tokens == MAX_REQUEST_TOKENS
    assert refusal(endless, 1, MAX_REQUEST_TOKENS - 1) is None
    assert f"length is {MAX_REQUEST_TOKENS} tokens." in refusal(endless, 1, MAX_REQUEST_TOKENS)


@pytest.mark.parametrize(
    ("prompt", "answer", "reason"),
    [
        (0, 5, "the prompt is empty: at least 1 token is needed"),
        (5, 0, "max_tokens is 0: at least 1 is needed"),
        (5, -1, "max_tokens is -1: at least 1 is needed"),
    ],
)
def test_empty_requests_are_refused(prompt, answer, reason):
    assert refusal(SMALL, prompt, answer) == reason


@given(st.integers(1, 3000), st.integers(1, 3000), st.data())
def test_what_a_request_needs_next_grows_up_to_all_that_it_ever_needs(prompt, answer, data):
    emitted = data.draw(st.integers(0, answer - 1))
    needed = next_tokens(prompt + emitted, answer - emitted)
    assert needed <= reserved_tokens(prompt, answer)
    assert prompt + emitted <= needed < prompt + emitted + NEXT_ANSWER_TOKENS
    if answer - emitted <= NEXT_ANSWER_TOKENS:
        assert needed == reserved_tokens(prompt, answer)
