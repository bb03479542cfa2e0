"""Any input to any route gets a response or a refusal, and never a 500."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_dp.orchestrator.formats.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.formats.openai.completion_request import CompletionRequest
from mlx_dp.orchestrator.formats.openai.unsupported import NEUTRAL
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.http.http_calls import CHAT, COMPLETIONS
from tests.support.http.scripted_service import OPTIONS, ScriptedService

SERVICE = ScriptedService()
APP = create_app(SERVICE, OPTIONS, FakeTextModel(512))
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
JSON_TYPE = {"content-type": "application/json"}

HOSTILE = st.sampled_from(
    [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, -0.0, "", "1",
     "\x00", "\u2028", "a" * 300, "é😀", "..", "%2e", "</s>", "{{ 7 * 7 }}", "\\ud800", [], {},
     [[]], [None], [0, 1], [2**40], [True], ["a", 1], {"": ""}, {"type": "text"}, {"1": 1e9}]
)  # fmt: skip
LEAVES = HOSTILE | st.text(max_size=20) | st.integers() | st.floats()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL, "best_of"})
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), VALUES)
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": LEAVES}),
    max_size=3,
)
GOOD = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


def ask(method: str, path: str, **arguments: Any) -> httpx.Response:
    SERVICE.answers.clear()

    async def run() -> httpx.Response:
        # An error of the app is raised here, instead of its 500.
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            async with asyncio.timeout(20):
                return await client.request(method, path, **arguments)

    return asyncio.run(run())


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        said = response.json()["error"]
        assert said.keys() == {"message", "type", "param", "code"}
        assert len(said["message"]) < 1000
        assert said["message"].isprintable(), said["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@FEW
@given(fields=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=4))
def test_any_value_of_any_field_is_taken_or_refused(path: str, fields: dict[str, Any]) -> None:
    check(ask("POST", path, content=json.dumps({**GOOD, **fields}).encode(), headers=JSON_TYPE))


@FEW
@given(messages=MESSAGES)
def test_any_messages_are_taken_or_refused(messages: list[Any]) -> None:
    body = json.dumps({"messages": messages}).encode()
    check(ask("POST", CHAT, content=body, headers=JSON_TYPE))


@FEW
@given(prompt=VALUES | st.lists(st.integers(-2, 600), max_size=600))
def test_any_prompt_is_taken_or_refused(prompt: Any) -> None:
    body = json.dumps({"prompt": prompt}).encode()
    check(ask("POST", COMPLETIONS, content=body, headers=JSON_TYPE))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@FEW
@given(content=st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_taken_or_refused(path: str, content: bytes) -> None:
    response = ask("POST", path, content=content, headers=JSON_TYPE)
    check(response)
    if not content.startswith(b"{"):
        assert response.status_code == 400


@FEW
@given(
    route=st.sampled_from([route for route in APP.routes if isinstance(route, APIRoute)]),
    method=st.sampled_from(["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "X"]),
    part=st.text(min_size=1, max_size=30),
    content=st.binary(max_size=50),
    name=st.sampled_from(
        [
            "x-request-id",
            "traceparent",
            "tracestate",
            "x-data-parallel-rank",
            "content-type",
            "content-encoding",
            "origin",
            "host",
            "authorization",
        ]
    ),
    value=st.text(st.characters(codec="latin-1", exclude_characters="\r\n\x00"), max_size=40),
)
def test_any_header_on_any_route_is_taken_or_refused(
    route: APIRoute, method: str, part: str, content: bytes, name: str, value: str
) -> None:
    path, part = route.path, quote(part, safe="")
    for parameter in route.param_convertors:
        path = path.replace(f"{{{parameter}:path}}", part).replace(f"{{{parameter}}}", part)
    headers = {name: value.encode("latin-1")}
    response = ask(method, path, content=content, headers=headers)
    assert response.status_code < 500 or response.status_code == 503, response.text
    for sent in response.headers.values():
        assert sent.isprintable()


BOMBS = {
    "arrays": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects": b'{"prompt":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "an unknown field": b'{"prompt":"x","y":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "unclosed": b"[" * 1_000_000,
    "a schema as text": json.dumps({"prompt": "x", "json_schema": "[" * 100_000}).encode(),
    "half a character": b'{"prompt":"\\ud800"}',
    "the other half": b'{"prompt":"\\udc00x"}',
    "half a character in UTF-8": b'{"prompt":"\xed\xa0\x80"}',
    "no UTF-8": b'{"prompt":"\xff"}',
    "no end": b'{"prompt":"',
    "a number without end": b'{"prompt":"x","seed":' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str) -> None:
    response = ask("POST", COMPLETIONS, content=BOMBS[name], headers=JSON_TYPE)
    assert response.status_code == 400
    check(response)


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\U0001f600", "e\u0301", "\u202e", "\ufffe"])
def test_odd_characters_are_text(text: str) -> None:
    response = ask("POST", COMPLETIONS, json={"prompt": text, "echo": True})
    assert response.json()["choices"][0]["text"].startswith(text)
