"""A format that shares nothing with OpenAI's needs only its row in the table."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_dp.orchestrator.api import Ended, NewTokens, ServiceStatus
from mlx_dp.orchestrator.formats.openai.openai_format import OpenAiFormat
from mlx_dp.orchestrator.formats.table import FormatTable
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.http.body.body_parser import INLINE_SIGNS
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.proto.messages.events import FinishReason
from tests.support.http import foreign_format
from tests.support.http.foreign_format import KEY_HEADER, PATH, TelegramFormat, event
from tests.support.http.http_calls import CHAT, HI, error
from tests.support.http.scripted_service import API_KEY, OPTIONS, ScriptedService, granted, says

KEYED = replace(OPTIONS, api_key=API_KEY)
PAGE = "https://chat.example.com"


def app_of(service: ScriptedService, options: HttpOptions = OPTIONS) -> Any:
    formats = FormatTable((OpenAiFormat(), TelegramFormat()))
    return create_app(service, options, FakeTextModel(512), formats=formats)


def send(
    service: ScriptedService,
    path: str = PATH,
    method: str = "POST",
    options: HttpOptions = OPTIONS,
    **arguments: Any,
) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(service, options), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(run())


def problem(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"problem", "field"}
    return response.json()


@pytest.mark.parametrize("path", [PATH, "/telegrams", f"/{PATH}/"])
def test_a_whole_response_is_its_own(path: str) -> None:
    service = ScriptedService(lambda _: says("hi"))
    response = send(service, path, json={"words": ["a", [66, 67]], "length": 9})
    assert response.json() == {"lines": ["hi STOP", "hi STOP"], "received": 6}
    assert [each.generation.prompt_ids for each in service.answers] == [(97,), (66, 67)]
    assert [each.generation.max_tokens for each in service.answers] == [9, 9]


def test_a_stream_has_its_own_events_and_nothing_else() -> None:
    service = ScriptedService(lambda _: says("hi"))
    response = send(service, json={"words": ["abc"], "live": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-dp-rank"] == "0"
    assert response.content == b"".join(
        (
            event("connect", model=OPTIONS.served_model_name),
            event("open", line=0) + event("word", line=0, text="h", count=1),
            event("word", line=0, text="i", count=2),
            event("stop", line=0, why="STOP", count=3),
            event("hangup", sent=3, received=3),
        )
    )


def test_a_stream_that_fails_ends_in_its_own_way() -> None:
    failed = Ended(reason=FinishReason.ERROR, message="the line is down", code="lost")
    service = ScriptedService(lambda _: [granted(), NewTokens(ids=(104,)), failed])
    response = send(service, json={"words": ["abc"], "live": True})
    assert response.content.endswith(event("cut", problem="the line is down"))


def test_silence_is_filled_in_its_own_way() -> None:
    service = ScriptedService(lambda _: [granted()])
    received: list[bytes] = []

    async def run() -> None:
        app = app_of(service, replace(OPTIONS, keep_alive_s=0.01))
        body = b'{"words": ["abc"], "live": true}'
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def collect(message: Any) -> None:
            received.append(message.get("body", b""))
            if received[-1] == event("tick"):
                service.answers[0].feed([Ended(reason=FinishReason.STOP)])

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": PATH,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        }
        async with asyncio.timeout(60):
            await app(scope, receive, collect)

    asyncio.run(run())
    assert event("tick") in received
    assert received[-1] == event("hangup", sent=3, received=0)


@pytest.mark.parametrize(
    ("arguments", "status", "field"),
    [
        ({"json": {"words": ["a"], "length": "x"}}, 400, "length"),
        ({"json": {"words": [[600]]}}, 400, "words"),
        ({"json": {"words": ["a"], "length": 10**6}}, 400, "length"),
        ({"json": {}}, 400, "words"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, None),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, None),
        ({"json": {"words": ["a" * 2**20]}}, 413, None),
        ({"method": "PUT"}, 405, None),
        ({"path": f"{PATH}/unknown"}, 404, None),
        ({"json": {"words": ["a"]}, "headers": {"content-length": "9" * 9}}, 413, None),
    ],
)
def test_errors_have_its_shape_and_its_names(
    arguments: dict[str, Any], status: int, field: str | None
) -> None:
    service = ScriptedService()
    service.strict_max_tokens = True
    options = replace(OPTIONS, max_body_nbytes=2**19)
    assert problem(send(service, options=options, **arguments), status)["field"] == field


def test_its_statuses_are_its_own() -> None:
    service = ScriptedService()
    service.current = replace(service.current, status=ServiceStatus.DRAINING)
    response = send(service, json={"words": ["a"]})
    assert "draining" in problem(response, 529)["problem"]
    assert response.headers["retry-after"] == "5"


def test_a_bug_shows_in_its_shape_and_tells_nothing() -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("secret")

    found = problem(send(ScriptedService(broken), json={"words": ["a"]}), 500)
    assert "secret" not in str(found)


def test_its_key_comes_in_its_own_header() -> None:
    key, body = API_KEY.encode(), {"words": ["a"]}
    bearer = {"authorization": b"Bearer " + key}
    own = {KEY_HEADER: key}
    refused = send(ScriptedService(), options=KEYED, json=body, headers=bearer)
    assert KEY_HEADER in problem(refused, 401)["problem"]
    assert "www-authenticate" not in refused.headers
    problem(send(ScriptedService(), options=KEYED, json=body), 401)
    problem(send(ScriptedService(), options=KEYED, json=body, headers={KEY_HEADER: b"x"}), 401)
    assert send(ScriptedService(), options=KEYED, json=body, headers=own).is_success
    chat = {"messages": HI}
    error(send(ScriptedService(), CHAT, options=KEYED, json=chat, headers=own), 401)
    assert send(ScriptedService(), CHAT, options=KEYED, json=chat, headers=bearer).is_success


def test_pages_of_listed_origins_may_call_it() -> None:
    options = replace(OPTIONS, cors_origins=(PAGE,))
    headers = {"origin": PAGE}
    response = send(ScriptedService(), options=options, json={"words": ["a"]}, headers=headers)
    assert response.headers["access-control-allow-origin"] == PAGE


def test_the_document_describes_it() -> None:
    document = send(ScriptedService(), "/openapi.json", "GET").json()
    operation = document["paths"][PATH]["post"]
    assert operation["description"] == "Sends a telegram."
    assert "Telegram" in str(operation["requestBody"])
    assert "words" in document["components"]["schemas"]["Telegram"]["properties"]


@pytest.mark.system
def test_its_large_bodies_are_parsed_in_a_process_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(foreign_format.__file__).parents[3]))
    service = ScriptedService()
    service.bounds = None
    many = 10 * INLINE_SIGNS
    response = send(service, json={"words": [[65] * many], "length": 3})
    assert response.is_success, response.text
    assert service.generation.prompt_ids == (65,) * many
    failed = send(ScriptedService(), json={"words": [["x"] * many]})
    assert problem(failed, 400)["field"].startswith("words")


def test_other_routes_keep_the_default_format() -> None:
    error(send(ScriptedService(), "/nowhere", json={}), 404)
    error(send(ScriptedService(), CHAT, json={}), 400)


def test_two_formats_cannot_share_a_path() -> None:
    with pytest.raises(AssertionError, match="share a path"):
        FormatTable((TelegramFormat(), OpenAiFormat(), TelegramFormat()))
