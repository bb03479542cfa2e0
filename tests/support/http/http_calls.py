"""Calls an app in this process, for tests of the HTTP side."""

import asyncio
import json
from typing import Any

import httpx

from mlx_dp.orchestrator.api import Service
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.text_model import TextModel
from tests.support.http.scripted_service import OPTIONS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def call(
    service: Service,
    method: str,
    path: str,
    *,
    options: HttpOptions = OPTIONS,
    text: TextModel | None = None,
    **arguments: Any,
) -> httpx.Response:
    """One request, and its whole response."""

    async def run() -> httpx.Response:
        app = create_app(service, options, text or FakeTextModel(512))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(run())


def chat(service: Service, **body: Any) -> httpx.Response:
    return call(service, "POST", CHAT, json={"messages": HI, **body})


def complete(service: Service, **body: Any) -> httpx.Response:
    return call(service, "POST", COMPLETIONS, json={"prompt": "hi", **body})


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have this status and OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found
