"""Refused requests: their status, and an error that names field, value and bound."""

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mlx_dp.orchestrator.api import RefusedError, ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.formats.common.validation import from_validation
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.control.owner_states import LOADING
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call, chat, complete, error
from tests.support.http.scripted_service import OPTIONS, STATE, ScriptedService

NUMBERS = {
    "temperature": (0, 100),
    "top_p": (None, 1),
    "min_p": (0, 1),
    "repetition_penalty": (None, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 128),
    "max_tokens": (-1, 2**63 - 1),
    "max_completion_tokens": (-1, 2**63 - 1),
    "min_tokens": (0, 2**20),
    "routed_dp_rank": (0, 2**20),
    "data_parallel_rank": (0, 2**20),
    "top_logprobs": (-1, 20),
}


def bad_numbers() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, (low, high) in NUMBERS.items():
        found += [(name, True), (name, "1"), (name, [1]), (name, {}), (name, 10**30)]
        found += [(name, -(10**30)), (name, (low or 0) - 1), (name, high + 1)]
    return found


@pytest.mark.parametrize(("name", "value"), bad_numbers())
def test_numbers_are_bounded_on_both_sides(name: str, value: object) -> None:
    service = ScriptedService()
    found = error(chat(service, **{"logprobs": True, name: value}), 400)
    assert found["param"] == name
    assert found["message"].startswith(f"{name}: ")
    assert found["type"] == "invalid_request_error"
    assert not service.answers


@pytest.mark.parametrize("name", [*NUMBERS, "logit_bias"])
@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity", "1e999999999"])
def test_no_number_is_infinite_or_nan(name: str, number: str) -> None:
    value = f'{{"1": {number}}}' if name == "logit_bias" else number
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{name}": {value}}}'
    headers = {"content-type": "application/json"}
    error(call(ScriptedService(), "POST", CHAT, content=body, headers=headers), 400)


def test_error_names_field_value_and_bound() -> None:
    message = error(chat(ScriptedService(), temperature=3000), 400)["message"]
    assert message == "temperature: input should be less than or equal to 100, got 3000"
    message = error(call(ScriptedService(), "POST", CHAT, json={}), 400)["message"]
    assert message == "messages: this field is required"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [f"stop {at}" for at in range(17)]),
        ("stop", "x" * 257),
        ("stop", 1),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [512]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * 129),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", [1]),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("stream", 1),
        ("stream", "true"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("reasoning_effort", "extreme"),
        ("reasoning_effort", 3),
        ("stream_options", {"continuous_usage_stats": 0}),
        ("logprobs", 1),
        ("model", 1),
        ("model", "x" * 1025),
        ("cache_salt", "x" * 257),
        ("cache_salt", 1),
        ("messages", []),
        ("messages", None),
        ("messages", "hi"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"__class__": True}),
        ("chat_template_kwargs", {"reasoning_effort": "extreme"}),
        ("chat_template_kwargs", {"enable_thinking": 1}),
    ],
)
def test_other_bad_values_are_refused_by_name(name: str, value: object) -> None:
    service = ScriptedService()
    param = error(chat(service, **{name: value}), 400)["param"]
    assert param.split(".")[0] == name
    assert not service.answers


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "user", "content": 1}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages.0.content"),
        ({"role": "critic", "content": "x"}, "messages.0.role"),
        ({"content": "x"}, "messages.0.role"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages.0.tool_calls"),
        ("hi", "messages.0"),
    ],
)
def test_bad_messages_are_refused_by_place(message: object, param: str) -> None:
    assert error(chat(ScriptedService(), messages=[message]), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logit_bias": {"1": 101}},
            "the bias of token 1 should be a number from -100 to 100, got 101",
        ),
        ({"logit_bias": {"x{}": 1}}, "keys should be token ids, such as \"42\", got 'x{}'"),
        (
            {"stop": ["a", "b" * 300]},
            f"each stop string should have at most 256 characters, got '{'b' * 79}...",
        ),
        ({"prompt": [1, -2, 3]}, "token ids should be from 0 to 2147483647, got -2"),
        ({"prompt": [[1], [2**31]]}, "token ids should be from 0 to 2147483647, got 2147483648"),
    ],
)
def test_a_bad_part_is_shown_itself(fields: dict[str, object], message: str) -> None:
    found = error(complete(ScriptedService(), **fields), 400)
    assert found["message"] == f"{found['param']}: {message}"


def test_image_parts_are_refused_by_name() -> None:
    content = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    found = error(chat(ScriptedService(), messages=[{"role": "user", "content": content}]), 400)
    assert "image_url" in found["message"]


UNSUPPORTED = {
    "max_new_tokens": 4,
    "no_repeat_ngram_size": 2,
    "top_n_sigma": 1,
    "detokenize": False,
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "audio": {},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content"},
    "suffix": "x",
    "best_of": 3,
    "use_beam_search": True,
    "min_new_tokens": 1,
    "prompt_embeds": "AAAA",
    "lora_path": "x",
    "continue_final_message": True,
    "chat_template": "{{ x }}",
    "adapters": "x",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_parameters_are_refused_by_name(name: str) -> None:
    for send in (chat, complete):
        found = error(send(ScriptedService(), **{name: UNSUPPORTED[name]}), 400)
        assert found["code"] == "unsupported_parameter"
        assert found["param"] == name


NEUTRAL: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "suffix": None,
    "best_of": 1,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "lora_path": None,
    "return_hidden_states": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}


def test_neutral_values_and_unknown_fields_are_fine() -> None:
    for send in (chat, complete):
        assert send(ScriptedService(), **NEUTRAL, a_router_added_this=1).status_code == 200
        assert send(ScriptedService(), **dict.fromkeys(UNSUPPORTED)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"1", b'"x"', b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\x00", b"\xef\xbb\xbf{}",
        b"9" * 5000, b'{"n": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in (CHAT, COMPLETIONS):
        error(call(ScriptedService(), "POST", path, content=body, headers=headers), 400)


def test_error_messages_stay_short_and_on_one_line() -> None:
    value = "a\nforged line\x1b[31m" + "x" * 10_000
    found = error(chat(ScriptedService(), temperature=value), 400)
    assert len(found["message"]) < 300
    assert found["message"].isprintable()
    found = error(call(ScriptedService(), "GET", "/" + "%0a" * 500), 404)
    assert len(found["message"]) < 300
    assert found["message"].isprintable()


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(content_type: str) -> None:
    content = json.dumps({"messages": HI})
    headers = {"content-type": content_type}
    error(call(ScriptedService(), "POST", CHAT, content=content, headers=headers), 415)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip", "\x01"])
def test_bodies_that_are_packed_are_not_unpacked(encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    content = gzip.compress(b'{"prompt":"' + b" " * 1_000_000 + b'"}')
    response = call(ScriptedService(), "POST", COMPLETIONS, content=content, headers=headers)
    assert "content encoding" in error(response, 415)["message"]
    headers["content-encoding"] = "identity"
    plain = call(ScriptedService(), "POST", COMPLETIONS, content=b'{"prompt":"x"}', headers=headers)
    assert plain.is_success


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_cap_is_413(chunked: bool) -> None:
    options = HttpOptions(served_model_name="m", max_body_nbytes=1000)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]}).encode()

    async def pieces() -> Any:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    content = pieces() if chunked else body
    response = call(
        ScriptedService(),
        "POST",
        CHAT,
        options=options,
        content=content,
        headers={"content-type": "application/json"},
    )
    assert "1000" in error(response, 413)["message"]
    assert response.headers["connection"] == "close"


def test_unknown_model_route_and_method() -> None:
    found = error(chat(ScriptedService(), model="gpt-4"), 404)
    assert found["code"] == "model_not_found"
    assert found["param"] == "model"
    assert error(call(ScriptedService(), "GET", "/v1/nothing"), 404)["code"] == "unknown_route"
    response = call(ScriptedService(), "GET", CHAT)
    assert error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert chat(ScriptedService(), model=OPTIONS.served_model_name).is_success
    assert chat(ScriptedService(), model=None).is_success


class Untouchable(FakeTextModel):
    """Fails when anything is tokenized."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        raise AssertionError("tokenized before it was refused")


TAKING = (ServiceStatus.READY, ServiceStatus.RESTARTING)


@pytest.mark.parametrize("status", [s for s in ServiceStatus if s not in TAKING])
def test_service_that_is_not_ready_answers_503_before_tokenizing(status: ServiceStatus) -> None:
    service = ScriptedService()
    service.current = replace(STATE, status=status)
    for stream in (False, True):
        response = call(
            service,
            "POST",
            CHAT,
            text=Untouchable(512),
            json={"messages": HI, "stream": stream},
        )
        assert error(response, 503)["type"] == "overloaded_error"
        assert int(response.headers["retry-after"]) > 0


def restarting(*, queued: int = 0, max_queued: int = 16) -> ScriptedService:
    """All owners are restarting on request, so their slots are unknown."""
    away = replace(LOADING, message="restarts on request", restarting=True)
    service = ScriptedService(owners=(away, replace(away, dp_rank=1)))
    service.current = replace(
        service.current,
        status=ServiceStatus.RESTARTING,
        queued_requests=queued,
        max_queued_requests=max_queued,
    )
    return service


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"routed_dp_rank": 1}])
def test_service_that_restarts_on_request_takes_what_its_queue_holds(fields: dict) -> None:
    assert chat(restarting(), **fields).is_success
    error(chat(restarting(queued=16), **fields), 429)


def test_more_choices_than_the_queue_holds_may_work_after_a_restart() -> None:
    error(chat(restarting(max_queued=2), n=3), 429)


def test_full_queue_is_429_before_tokenizing() -> None:
    service = ScriptedService()
    service.current = replace(STATE, queued_requests=16)
    response = call(service, "POST", CHAT, text=Untouchable(512), json={"messages": HI})
    assert error(response, 429)["type"] == "overloaded_error"
    assert response.headers["retry-after"] == "1"
    service.current = replace(STATE, queued_requests=14)
    response = call(service, "POST", CHAT, text=Untouchable(512), json={"messages": HI, "n": 3})
    error(response, 429)


def test_more_choices_than_the_queue_holds_can_never_work() -> None:
    assert "16 wait" in error(chat(ScriptedService(), n=33), 400)["message"]


@pytest.mark.parametrize("rank", ["2", "-1", "x", "1.0", "", "9" * 40, "\u0661"])
def test_rank_that_does_not_exist_is_400_before_tokenizing(rank: str) -> None:
    response = call(
        ScriptedService(),
        "POST",
        CHAT,
        text=Untouchable(512),
        json={"messages": HI},
        headers={"X-Data-Parallel-Rank": rank.encode()},
    )
    assert error(response, 400)["param"] == "X-Data-Parallel-Rank"


def test_a_rank_that_is_no_number_is_told_the_range() -> None:
    headers = {"X-Data-Parallel-Rank": "-1"}
    found = error(
        call(ScriptedService(), "POST", CHAT, json={"messages": HI}, headers=headers), 400
    )
    assert found["message"] == "X-Data-Parallel-Rank: it should be a rank from 0 to 1, got '-1'"


def test_a_body_of_two_lengths_is_refused_and_ends_its_connection() -> None:
    headers = {"content-length": "5", "transfer-encoding": "chunked"}
    response = call(ScriptedService(), "POST", CHAT, content=b"hello", headers=headers)
    assert "not both" in error(response, 400)["message"]
    assert response.headers["connection"] == "close"


def test_rank_out_of_range_names_the_range() -> None:
    found = error(chat(ScriptedService(), routed_dp_rank=2), 400)
    assert found["message"] == "routed_dp_rank: 2 is out of range, ranks are 0 to 1"


def test_request_for_an_owner_that_is_not_ready_is_never_moved() -> None:
    lost = replace(STATE.owners[1], status=WorkerStatus.LOST)
    service = ScriptedService(owners=(STATE.owners[0], lost))
    assert "rank 1 is lost" in error(chat(service, routed_dp_rank=1), 503)["message"]
    assert chat(service, routed_dp_rank=0).is_success


def test_a_chat_is_refused_by_its_messages() -> None:
    service = ScriptedService()

    def refuse(generation: object) -> Any:
        raise RefusedError("no", param="prompt")

    service.submit = refuse
    assert error(chat(service), 400)["param"] == "messages"
    assert error(complete(service), 400)["param"] == "prompt"


def test_internal_errors_tell_nothing() -> None:
    service = ScriptedService()

    def fail(_generation: Any) -> Any:
        raise RuntimeError("secret")

    service.submit = fail
    assert error(chat(service), 500)["message"] == "internal error"


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"\x1b[31m\n" + "x" * 40_000: 1}},
        {"chat_template_kwargs": {"\x1b[31m\n" + "x" * 40_000: 1}},
        {"response_format": {"type": "\x1b[31m\n" + "x" * 40_000}},
    ],
)
def test_names_that_the_client_made_up_are_shown_short_and_escaped(fields: dict) -> None:
    found = error(chat(ScriptedService(), **fields), 400)
    assert found["param"].isprintable()
    assert found["message"].isprintable()
    assert len(found["param"] + found["message"]) < 1000


def test_places_are_shown_escaped() -> None:
    class Named(BaseModel):
        members: dict[str, int]

    with pytest.raises(ValidationError) as caught:
        Named.model_validate({"members": {"\x1b\n" + "x" * 400: "a"}})
    param = from_validation(caught.value).param
    assert param is not None
    assert param.startswith("members.\\x1b\\nxxx")
    assert len(param) < 100
