"""Values that say "unset" or change nothing, and numbers as clients write them."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_dp.orchestrator.api import Generation
from tests.support.http.http_calls import CHAT, HI, call, chat, complete, error
from tests.support.http.recording_model import RecordingModel
from tests.support.http.scripted_service import ScriptedService

BOTH = (chat, complete)

UNSET: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"max_completion_tokens": -1},
    {"max_tokens": -1.0},
    {"max_tokens": -1, "max_completion_tokens": -1},
    {"seed": None},
    {"n": None},
    {"n": 1.0},
    {"min_tokens": 0},
    {"min_tokens": 0.0},
    {"min_tokens": None},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": -1.0},
    {"min_p": 0},
    {"presence_penalty": 0},
    {"frequency_penalty": 0.0},
    {"repetition_penalty": 0},
    {"repetition_penalty": 1},
    {"logit_bias": []},
    {"logit_bias": {}},
    {"stop": ""},
    {"stop": [""]},
    {"stop": ["", ""]},
    {"stop": []},
    {"stop": None},
    {"stop_token_ids": []},
    {"top_logprobs": 0},
    {"top_logprobs": -1},
    {"top_logprobs": None},
    {"logprobs": False},
    {"logprobs": False, "top_logprobs": 0},
    {"logprobs": None, "top_logprobs": 0},
    {"grammar": ""},
    {"response_format": {}},
    {"response_format": {"type": "text"}},
    {"ignore_eos": False},
    {"stream_options": None},
    {"stream_options": {}},
    {"best_of": 1},
    {"best_of": 1.0},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": None},
    {"allowed_token_ids": []},
    {"thinking_token_budget": -1},
    {"modalities": ["text"]},
    {"web_search_options": None},
    {"prediction": None},
    {"length_penalty": 1.0},
    {"return_token_ids": False},
    {"cache_salt": ""},
]

HINTS: list[dict[str, Any]] = [
    {"store": True},
    {"store": False},
    {"priority": 0},
    {"priority": 7},
    {"priority": -3},
    {"service_tier": "auto"},
    {"service_tier": "priority"},
    {"verbosity": "low"},
    {"user": "someone"},
    {"metadata": {"a": "b"}},
    {"prompt_cache_key": "x"},
    {"safety_identifier": "x"},
    {"parallel_tool_calls": False},
    {"num_draft_tokens": 3},
    {"repetition_context_size": 64},
    {"repetition_context_size": 20},
    {"presence_context_size": 20},
    {"frequency_context_size": 20},
]


def generation(send: Any, **fields: Any) -> Generation:
    service = ScriptedService()
    response = send(service, **fields)
    assert response.status_code == 200, response.text
    return service.generation


def without_seed(made: Generation) -> object:
    return replace(made, params=replace(made.params, seed=0), label="")


@pytest.mark.parametrize("send", BOTH)
@pytest.mark.parametrize("fields", [*UNSET, *HINTS], ids=repr)
def test_a_value_that_changes_nothing_changes_nothing(send: Any, fields: dict[str, Any]) -> None:
    assert without_seed(generation(send, **fields)) == without_seed(generation(send))


@pytest.mark.parametrize("send", BOTH)
def test_a_seed_of_minus_one_is_a_new_one_each_time(send: Any) -> None:
    seeds = {generation(send, seed=-1).params.seed for _ in range(4)}
    assert len(seeds) == 4


def test_any_other_seed_is_one() -> None:
    assert generation(chat, seed=42.0).params.seed == 42
    assert generation(chat, seed=-2).params.seed == generation(chat, seed=-2).params.seed
    assert generation(chat, seed=-(2**63)).params.seed == 0


@pytest.mark.parametrize("send", BOTH)
def test_an_integral_float_is_an_integer(send: Any) -> None:
    made = generation(
        send, max_tokens=150.0, top_k=40.0, min_tokens=3.0, seed=5.0, n=1.0,
        stop_token_ids=[7.0], routed_dp_rank=1.0, best_of=1.0,
    )  # fmt: skip
    assert made.max_tokens == 150
    assert type(made.max_tokens) is int
    assert (made.params.top_k, made.params.min_tokens, made.params.seed) == (40, 3, 5)
    assert all(type(value) is int for value in (made.params.top_k, made.params.seed))
    assert made.stop_token_ids == (256, 7)
    assert made.routed_dp_rank == 1


def test_integral_floats_are_token_ids_and_logprob_counts() -> None:
    assert generation(complete, prompt=[1.0, 2, 3.0]).prompt_ids == (1, 2, 3)
    assert generation(complete, prompt=[[4.0, 5]]).prompt_ids == (4, 5)
    assert generation(complete, logprobs=2.0).params.logprobs == 2
    assert generation(chat, logprobs=True, top_logprobs=2.0).params.logprobs == 2
    found = error(complete(ScriptedService(), prompt=[1.5, 2]), 400)
    assert found["param"] == "prompt"


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "n", "routed_dp_rank"],
)
@pytest.mark.parametrize("value", [1.5, "7", "0.7", True, [1]])
def test_nothing_else_becomes_an_integer(name: str, value: object) -> None:
    assert error(chat(ScriptedService(), **{name: value}), 400)["param"] == name


@pytest.mark.parametrize(
    "name", ["best_of", "max_tokens", "n", "temperature", "top_p", "top_k", "seed", "min_tokens",
             "min_p", "top_logprobs", "presence_penalty", "length_penalty", "prompt_logprobs"],
)  # fmt: skip
def test_true_is_no_number(name: str) -> None:
    fields = {name: True} if name != "top_logprobs" else {name: True, "logprobs": True}
    assert error(chat(ScriptedService(), **fields), 400)["param"] == name


def test_true_is_no_token_id_no_bias_and_no_count() -> None:
    for fields in ({"prompt": [True]}, {"logit_bias": {"1": True}}, {"stop_token_ids": [True]},
                   {"logprobs": True}):  # fmt: skip
        error(complete(ScriptedService(), **fields), 400)


@pytest.mark.parametrize("name", ["store_nothing", "use_beam_search", "continue_final_message"])
def test_zero_is_not_false(name: str) -> None:
    response = chat(ScriptedService(), **{name: 0})
    if name == "store_nothing":
        assert response.status_code == 200
    else:
        assert error(response, 400)["param"] == name


@pytest.mark.parametrize("send", BOTH)
def test_sixteen_stop_strings_are_taken(send: Any) -> None:
    stops = [f"stop {number:02}" for number in range(16)]
    service = ScriptedService()
    assert send(service, stop=stops).status_code == 200
    assert "at most 16" in error(send(service, stop=[*stops, "more"]), 400)["message"]
    assert send(ScriptedService(), stop=[*stops, "", stops[0]]).status_code == 200


def test_each_of_many_stop_strings_ends_the_answer() -> None:
    # The answer is "Hello, wörld 😀!".
    stops = [f"never {number}" for number in range(15)]
    for at in range(16):
        response = chat(ScriptedService(), stop=[*stops[:at], " w", *stops[at:]])
        assert response.json()["choices"][0]["message"]["content"] == "Hello,"


def test_empty_stop_strings_beside_others_are_left_out() -> None:
    response = chat(ScriptedService(), stop=["", " w"])
    assert response.json()["choices"][0]["message"]["content"] == "Hello,"


@pytest.mark.parametrize(
    ("penalty", "window"),
    [
        ("repetition_penalty", "repetition_context_size"),
        ("presence_penalty", "presence_context_size"),
        ("frequency_penalty", "frequency_context_size"),
    ],
)
def test_a_window_matters_only_where_something_is_counted(penalty: str, window: str) -> None:
    for value in (None, 0, 20, 20.0):
        assert chat(ScriptedService(), **{penalty: 1.5, window: value}).status_code == 200
    for value in (64, True, "20"):
        found = error(chat(ScriptedService(), **{penalty: 1.5, window: value}), 400)
        assert found["param"] == window
        assert penalty in found["message"]


def arguments(**fields: Any) -> dict[str, object]:
    text = RecordingModel()
    response = call(ScriptedService(), "POST", CHAT, text=text, json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    return dict(text.chats[0].arguments)


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
def test_reasoning_effort_is_an_argument_of_the_template(effort: str) -> None:
    assert arguments(reasoning_effort=effort) == {"reasoning_effort": effort}
    kwargs = {"reasoning_effort": effort, "enable_thinking": None}
    assert arguments(chat_template_kwargs=kwargs) == {"reasoning_effort": effort}


def test_no_effort_is_no_thinking_unless_the_client_says_otherwise() -> None:
    assert arguments(reasoning_effort=None) == {}
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert arguments(reasoning_effort="none") == off
    kwargs = {"enable_thinking": True}
    found = arguments(reasoning_effort="none", chat_template_kwargs=kwargs)
    assert found == {**off, "enable_thinking": True}


def test_an_unknown_effort_is_told_those_that_exist() -> None:
    message = error(chat(ScriptedService(), reasoning_effort="extreme"), 400)["message"]
    assert message.startswith("reasoning_effort: ")
    assert "'xhigh'" in message
    assert "'extreme'" in message


def test_a_completion_has_no_template_to_tell() -> None:
    assert error(complete(ScriptedService(), reasoning_effort="low"), 400)["code"] == (
        "unsupported_parameter"
    )
