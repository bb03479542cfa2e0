"""POST /v1/chat/completions, streamed and not."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.http.preparation.prompt import INLINE_LIMIT_S
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.chat.chat_template import LIMIT_S, ChatTemplateTimeoutError
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.text_model import Chat, RenderedChat
from mlx_dp.proto.messages.events import FinishReason, TokenLogprob
from tests.support.http.http_calls import CHAT, HI, call, chat, error, events
from tests.support.http.scripted_service import OPTIONS, ScriptedService, granted, says


def deltas(response: httpx.Response, index: int = 0) -> str:
    chosen = [e["choices"][0] for e in events(response) if e["choices"]]
    return "".join(c["delta"].get("content", "") for c in chosen if c["index"] == index)


def reasons(response: httpx.Response) -> list[str]:
    chosen = [e["choices"][0]["finish_reason"] for e in events(response) if e["choices"]]
    return [reason for reason in chosen if reason]


def test_whole_answer_has_text_reason_and_exact_usage() -> None:
    service = ScriptedService()
    response = chat(service, model="demo/fake")
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, wörld 😀!"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len(b"user: hi\nassistant: ")
    # The end-of-text token counts, and is not shown.
    answer = len("Hello, wörld 😀!".encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert response.headers["x-dp-rank"] == "0"
    assert service.generation.stop_token_ids == (256,)
    assert service.generation.max_tokens is None


def test_stream_never_splits_a_character_and_has_one_role() -> None:
    response = chat(ScriptedService(), stream=True)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-dp-rank"] == "0"
    assert "\ufffd" not in response.text
    assert deltas(response) == "Hello, wörld 😀!"
    assert reasons(response) == ["stop"]
    chunks = events(response)
    assert [c["choices"][0]["delta"].get("role") for c in chunks].count("assistant") == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


def test_usage_comes_last_in_a_stream_when_asked_for() -> None:
    response = chat(ScriptedService(), stream=True, stream_options={"include_usage": True})
    *chunks, last = events(response)
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len("Hello, wörld 😀!".encode()) + 1


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": None}, {"continuous_usage_stats": False}, None]
)
def test_empty_stream_options_are_fine(options: object) -> None:
    assert reasons(chat(ScriptedService(), stream=True, stream_options=options)) == ["stop"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_slow_template_is_rendered_beside_the_event_loop(ends: bool) -> None:
    limits: list[tuple[float, bool]] = []
    loop_thread = threading.current_thread()

    class Text(FakeTextModel):
        def render_chat(self, chat: Chat, *, limit_s: float) -> RenderedChat:
            limits.append((limit_s, threading.current_thread() is loop_thread))
            if ends and len(limits) > 1:
                return RenderedChat("x")
            raise ChatTemplateTimeoutError("it takes longer")

    response = call(ScriptedService(), "POST", CHAT, text=Text(512), json={"messages": HI})
    assert limits == [(INLINE_LIMIT_S, True), (LIMIT_S, False)]
    if ends:
        assert response.is_success
    else:
        assert "it takes longer" in error(response, 400)["message"]


def test_long_names_are_rendered_beside_the_event_loop_too() -> None:
    threads: list[threading.Thread] = []

    class Text(FakeTextModel):
        def render_chat(self, chat: Chat, *, limit_s: float) -> RenderedChat:
            threads.append(threading.current_thread())
            return RenderedChat("x")

    short = [{"role": "user", "content": "x", "name": "y" * 200}]
    for messages in (short, short * 30):
        call(ScriptedService(), "POST", CHAT, text=Text(512), json={"messages": messages})
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_not_shown_and_ends_the_generation(stream: bool) -> None:
    service = ScriptedService(lambda _: says("one two three four", FinishReason.LENGTH))
    response = chat(service, stream=stream, stop=[" three", "zzz"])
    if stream:
        assert deltas(response) == "one two"
        assert reasons(response) == ["stop"]
        # No chunk holds a beginning of the stop string that turned out to be one.
        assert " t" not in deltas(response)[4:]
    else:
        choice = response.json()["choices"][0]
        assert choice["message"]["content"] == "one two"
        assert choice["finish_reason"] == "stop"
        # Counted up to the token that completed the stop string.
        assert response.json()["usage"]["completion_tokens"] == len("one two three")
    assert service.answers[0].cancelled.is_set()


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    response = chat(ScriptedService(lambda _: says("ends with th")), stop=["three"], stream=True)
    assert deltas(response) == "ends with th"


def test_unfinished_character_becomes_a_replacement_character() -> None:
    events_ = [granted(), NewTokens(ids=tuple(b"ok \xf0\x9f")), Ended(reason=FinishReason.LENGTH)]
    response = chat(ScriptedService(lambda _: events_))
    assert response.json()["choices"][0]["message"]["content"] == "ok \ufffd"
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_independent(stream: bool) -> None:
    service = ScriptedService()
    service.reply = lambda _: says(f"answer {len(service.answers)}", owner=len(service.answers))
    response = chat(service, n=3, seed=7, stream=stream)
    if stream:
        texts = [deltas(response, index) for index in range(3)]
    else:
        texts = [c["message"]["content"] for c in response.json()["choices"]]
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == 3 * (len("answer 0") + 1)
        assert usage["prompt_tokens"] == len(b"user: hi\nassistant: ")
        assert response.headers["x-dp-rank"] == "0,1,2"
    assert texts == ["answer 0", "answer 1", "answer 2"]
    assert [a.generation.params.seed for a in service.answers] == [7, 8, 9]


def test_all_choices_are_cancelled_when_one_is_not_admitted() -> None:
    service = ScriptedService(lambda _: [])
    service.refuse_from = 2
    response = chat(service, n=3)
    assert error(response, 429)["type"] == "overloaded_error"
    assert response.headers["retry-after"] == "3"
    assert [answer.cancelled.is_set() for answer in service.answers] == [True, True]


def test_failure_is_an_error_and_never_a_partial_answer() -> None:
    failed = Ended(
        reason=FinishReason.ERROR, message="worker 0 died", code="worker_lost", status=502
    )
    script = [granted(), NewTokens(ids=(65,)), failed]
    found = error(chat(ScriptedService(lambda _: script)), 502)
    assert found == {
        "message": "worker 0 died",
        "type": "server_error",
        "param": None,
        "code": "worker_lost",
    }
    chunks = events(chat(ScriptedService(lambda _: script), stream=True))
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert all(not c["choices"][0]["finish_reason"] for c in chunks[:-1])


def test_an_internal_error_in_the_middle_of_a_stream_is_an_event_too() -> None:
    def script(_: object) -> list[Any]:
        return [granted(), NewTokens(ids=(65,)), "no event"]

    *_, last = events(chat(ScriptedService(script), stream=True))
    assert last["error"]["code"] == "internal_error"
    assert last["error"]["message"] == "internal error"


def test_failure_before_the_first_token_has_its_status_in_a_stream_too() -> None:
    failed = Ended(reason=FinishReason.ERROR, message="no", code="rejected", status=503)
    response = chat(ScriptedService(lambda _: [failed]), stream=True)
    assert error(response, 503)["code"] == "rejected"
    assert response.headers["retry-after"] == "1"


def test_logprobs_come_with_their_text() -> None:
    def reply(_: object) -> list[object]:
        tokens = [
            NewTokens(
                ids=(byte,), logprobs=(TokenLogprob(logprob=-0.5, top=((byte, -0.5), (0, -3.0))),)
            )
            for byte in "é!".encode()
        ]
        return [granted(), *tokens, Ended(reason=FinishReason.LENGTH)]

    service = ScriptedService(reply)
    body = chat(service, logprobs=True, top_logprobs=1).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2] == {
        "token": "!",
        "logprob": -0.5,
        "bytes": [33],
        "top_logprobs": [{"token": "!", "logprob": -0.5, "bytes": [33]}],
    }
    assert service.generation.params.logprobs == 1
    streamed = events(chat(ScriptedService(reply), logprobs=True, stream=True))
    entries = [
        entry["bytes"]
        for chunk in streamed
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert entries == [[0xC3], [0xA9], [0x21]]


def test_silence_is_filled_with_comments() -> None:
    async def run() -> str:
        service = ScriptedService(lambda _: [])
        options = HttpOptions(served_model_name="m", keep_alive_s=0.01)
        app = create_app(service, options, FakeTextModel(512))
        sent: list[bytes] = []
        commented = asyncio.Event()
        requests = asyncio.Queue[dict[str, object]]()
        body = json.dumps({"messages": HI, "stream": True}).encode()
        requests.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: dict[str, object]) -> None:
            sent.append(bytes(message.get("body", b"")))
            if b"".join(sent).count(b": keep-alive") == 2:
                commented.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        task = asyncio.create_task(app(scope, requests.get, send))
        async with asyncio.timeout(30):
            await commented.wait()
            service.answers[0].feed(says("late"))
            await task
        return b"".join(sent).decode()

    text = asyncio.run(run())
    assert text.index(": keep-alive") < text.index('"content":"l"')
    assert text.endswith("data: [DONE]\n\n")


def test_parameters_reach_the_service_and_null_means_the_default() -> None:
    service = ScriptedService()
    chat(
        service,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100},
        seed=3,
        max_tokens=5,
        max_completion_tokens=9,
        stop_token_ids=[7, 256],
        stop=None,
        n=None,
        user="someone",
        metadata={"a": "b"},
        unheard_of={"deep": [1]},
    )
    generation = service.generation
    params = generation.params
    assert generation.max_tokens == 9
    assert generation.stop_token_ids == (256, 7)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 0, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, -2)
    assert (params.frequency_penalty, params.logit_bias, params.seed) == (2, ((5, -100.0),), 3)
    assert params.logprobs is None
    nulls = ScriptedService()
    names = ("temperature", "top_p", "max_tokens", "logit_bias", "stream", "seed", "logprobs")
    assert chat(nulls, **dict.fromkeys(names)).status_code == 200
    assert nulls.generation.params.temperature == 1.0


def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    service = ScriptedService()
    chat(service, ignore_eos=True, stop_token_ids=[9])
    assert service.generation.stop_token_ids == (9,)


def test_content_parts_are_joined_and_developer_is_system() -> None:
    service = ScriptedService()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(
        service,
        messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}],
    )
    assert bytes(service.generation.prompt_ids) == b"system: x\nuser: ab\nassistant: "


def test_generation_prompt_can_be_left_out() -> None:
    service = ScriptedService()
    chat(service, add_generation_prompt=False)
    assert bytes(service.generation.prompt_ids) == b"user: hi\n"


def test_request_id_is_echoed_only_when_harmless() -> None:
    def sent(value: bytes) -> str:
        headers = [(b"x-request-id", value), (b"content-type", b"application/json")]
        body = json.dumps({"messages": HI}).encode()
        return call(ScriptedService(), "POST", CHAT, content=body, headers=headers).headers[
            "x-request-id"
        ]

    assert sent(b"abc-1:2") == "abc-1:2"
    for bad in (b"", b"a b", b"a\x1b[31m", b"x" * 129, "é".encode(), b'"'):
        assert sent(bad).isalnum()
        assert len(sent(bad)) == 32


def test_a_request_id_of_the_client_is_never_a_key() -> None:
    service = ScriptedService()
    headers = {"x-request-id": "0"}
    answers = [
        call(service, "POST", CHAT, json={"messages": HI}, headers=headers) for _ in range(2)
    ]
    assert [answer.request_id for answer in service.answers] == [0, 1]
    assert [each.generation.label for each in service.answers] == ["0", "0"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert not any(answer.json()["id"] == "chatcmpl-0" for answer in answers)


def test_trace_headers_are_passed_back() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = call(
        ScriptedService(),
        "POST",
        CHAT,
        json={"messages": HI},
        headers={"traceparent": trace, "tracestate": "a=b"},
    )
    assert response.headers["traceparent"] == trace
    assert response.headers["tracestate"] == "a=b"
    assert OPTIONS.api_key is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_are_shown_on_request(stream: bool, skip: bool | None) -> None:
    told = [granted(), NewTokens(ids=(97, 300, 98, 256)), Ended(reason=FinishReason.STOP)]
    response = chat(ScriptedService(lambda _: told), stream=stream, skip_special_tokens=skip)
    expected = "a<|300|>b" if skip is False else "ab"
    found = deltas(response) if stream else response.json()["choices"][0]["message"]["content"]
    assert found == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_may_be_a_stop_string(stream: bool) -> None:
    told = [granted(), NewTokens(ids=(97, 98, 300, 99)), Ended(reason=FinishReason.LENGTH)]
    for stop, expected in (("<|300|>", "ab"), ("b<|300|>", "a")):
        response = chat(ScriptedService(lambda _: told), stream=stream, stop=[stop])
        if stream:
            assert (deltas(response), reasons(response)) == (expected, ["stop"])
        else:
            [choice] = response.json()["choices"]
            assert choice["message"]["content"] == expected
            assert choice["finish_reason"] == "stop"
