"""Pages of listed origins may ask from a browser; all others, and administration, stay closed."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from fastapi.routing import APIRoute

from mlx_dp.orchestrator.api import ServiceStatus
from mlx_dp.orchestrator.formats.table import api_formats
from mlx_dp.orchestrator.http.access.host_policy import normal_origin
from mlx_dp.orchestrator.http.access.route_paths import CrossOriginPaths
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call
from tests.support.http.scripted_service import API_KEY, OPTIONS, STATE, ScriptedService
from tests.support.http.served_app import served

PAGE = "https://chat.example.com"
OTHER = "https://evil.example.com"
LISTED = replace(OPTIONS, cors_origins=(PAGE, "http://localhost:3000"))
KEYED = replace(LISTED, api_key=API_KEY)
OPEN = replace(KEYED, host="0.0.0.0")
KEY = {"authorization": f"Bearer {API_KEY}".encode()}
APP = create_app(ScriptedService(), OPTIONS, FakeTextModel(512))
PATHS = sorted(
    {r.path.replace("{name:path}", "demo/fake") for r in APP.routes if isinstance(r, APIRoute)}
)
SHARED = (CHAT, COMPLETIONS, "/v1/models", "/v1/models/demo/fake")


def preflight(
    path: str, origin: str, *, options: HttpOptions = KEYED, private: bool = False
) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        **({"access-control-request-private-network": "true"} if private else {}),
    }
    return call(ScriptedService(), "OPTIONS", path, options=options, headers=headers)


def grants(response: httpx.Response) -> dict[str, str]:
    return {
        name: value
        for name, value in response.headers.items()
        if name.startswith("access-control-")
    }


@pytest.mark.parametrize("options", [LISTED, KEYED, OPEN], ids=["open", "key", "network"])
@pytest.mark.parametrize("path", [*SHARED, "//v1/models/", "/chat/completions", "/models"])
def test_a_preflight_of_a_listed_page_needs_no_key(path: str, options: HttpOptions) -> None:
    response = preflight(f"http://test{path}", PAGE, options=options)
    assert response.status_code == 200
    granted = grants(response)
    assert granted["access-control-allow-origin"] == PAGE
    assert "POST" in granted["access-control-allow-methods"]
    asked = "authorization,content-type,x-stainless-lang"
    assert granted["access-control-allow-headers"] == asked
    assert "access-control-allow-credentials" not in granted
    assert "Origin" in response.headers["vary"]
    assert "access-control-allow-private-network" not in granted
    private = preflight(f"http://test{path}", PAGE, options=options, private=True)
    assert grants(private)["access-control-allow-private-network"] == "true"


def test_a_preflight_that_hides_another_request_is_refused_as_any_other() -> None:
    headers = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "content-length": "5",
        "transfer-encoding": "chunked",
    }
    response = call(ScriptedService(), "OPTIONS", CHAT, options=KEYED, headers=headers)
    assert response.status_code == 400
    assert response.headers["connection"] == "close"


def test_every_route_is_shared_or_not_by_its_name() -> None:
    shared = CrossOriginPaths(api_formats().paths)
    assert {path for path in PATHS if path in shared} == set(SHARED)
    assert {"/workers", "/flush_cache", "/metrics", "/v1/loads", "/server_info"} <= set(PATHS)


@pytest.mark.parametrize("options", [LISTED, OPEN], ids=["loopback", "network"])
def test_administration_is_never_shared(options: HttpOptions) -> None:
    for path in [path for path in PATHS if path not in SHARED]:
        for spelling in (path, f"/{path}/", path.removeprefix("/v1")):
            for method in ("GET", "POST", "OPTIONS"):
                headers = {"origin": PAGE, "access-control-request-method": "POST"}
                url = f"http://test{spelling.replace('{name}', '0')}"
                service = ScriptedService()
                response = call(service, method, url, options=options, headers={**headers, **KEY})
                assert not grants(response), (method, spelling)
                if options is LISTED:
                    assert response.status_code == 403
                    assert not service.restarting


@pytest.mark.parametrize("origin", [OTHER, "null", PAGE + ".evil.com", PAGE + ":8443", "http://x"])
@pytest.mark.parametrize("options", [LISTED, KEYED, OPEN], ids=["open", "key", "network"])
def test_an_unlisted_page_gets_nothing_and_caches_are_told_so(
    origin: str, options: HttpOptions
) -> None:
    for path in SHARED:
        for method in ("GET", "OPTIONS", "POST"):
            headers = {"origin": origin, "access-control-request-method": "POST", **KEY}
            response = call(ScriptedService(), method, path, options=options, headers=headers)
            assert not grants(response)
            assert response.headers["vary"] == "Origin"
            assert method != "OPTIONS" or not response.is_success


def asked(path: str, origin: str | None, **arguments: object) -> httpx.Response:
    headers = {**({} if origin is None else {"origin": origin}), **KEY}
    service = arguments.pop("service", None) or ScriptedService()
    return call(service, "POST", path, options=KEYED, headers=headers, **arguments)


def test_answers_and_all_kinds_of_errors_can_be_read_by_the_page() -> None:
    full = ScriptedService()
    full.refuse_from = 0
    draining = ScriptedService()
    draining.current = replace(STATE, status=ServiceStatus.DRAINING)
    broken = ScriptedService(lambda _: 1 / 0)
    hi = {"messages": HI}
    seen = {}
    for service, body in (
        (ScriptedService(), hi),
        (ScriptedService(), {"messages": HI, "temperature": -1}),
        (ScriptedService(), {"messages": HI, "model": "nobody"}),
        (full, hi),
        (draining, hi),
        (broken, hi),
    ):
        response = asked(CHAT, PAGE, json=body, service=service)
        seen[response.status_code] = response
    seen[401] = call(ScriptedService(), "POST", CHAT, options=KEYED, headers={"origin": PAGE})
    seen[405] = call(
        ScriptedService(), "DELETE", CHAT, options=KEYED, headers={"origin": PAGE, **KEY}
    )
    assert set(seen) == {200, 400, 401, 404, 405, 429, 500, 503}
    for response in seen.values():
        granted = grants(response)
        assert granted["access-control-allow-origin"] == PAGE
        exposed = granted["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-dp-rank", "x-routing-reason", "retry-after"} <= set(exposed)
        assert response.headers["vary"] == "Origin"
        assert response.headers["x-request-id"]


def test_a_stream_can_be_read_by_the_page() -> None:
    response = asked(CHAT, PAGE, json={"messages": HI, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert grants(response)["access-control-allow-origin"] == PAGE


def test_clients_that_are_no_pages_see_no_difference_but_vary() -> None:
    response = asked(CHAT, None, json={"messages": HI})
    assert response.is_success
    assert not grants(response)
    assert response.headers["vary"] == "Origin"


def test_a_page_asks_before_and_then_again_over_one_connection() -> None:
    before = {"origin": PAGE, "access-control-request-method": "POST"}

    async def run() -> None:
        async with asyncio.timeout(60), served(ScriptedService(), LISTED) as port:
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url) as client:
                for _ in range(2):
                    first = await client.options(CHAT, headers=before)
                    then = await client.post(CHAT, headers={"origin": PAGE}, json={"messages": HI})
                    for response in (first, then):
                        assert response.status_code == 200
                        assert response.headers["access-control-allow-origin"] == PAGE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://chat.example.com", "https://chat.example.com"),
        ("HTTPS://Chat.Example.COM", "https://chat.example.com"),
        ("https://chat.example.com:443", "https://chat.example.com"),
        ("http://chat.example.com:80", "http://chat.example.com"),
        ("http://chat.example.com:443", "http://chat.example.com:443"),
        ("http://localhost:03000", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_an_origin_is_known_as_the_browser_writes_it(text: str, origin: str) -> None:
    assert normal_origin(text) == origin


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("*", "every page"),
        ("null", "http://localhost:3000"),
        ("", "http://localhost:3000"),
        ("chat.example.com", "https://chat.example.com"),
        ("https://", "https://chat.example.com"),
        ("https://chat.example.com/", "give https://chat.example.com$"),
        ("https://Chat.example.com:443/app?x#y", "give https://chat.example.com$"),
        ("https://user@chat.example.com", "scheme, host"),
        ("https://*.example.com", "scheme, host"),
        ("https://bücher.example", "scheme, host"),
        ("https://a.example:99999", "0-65535"),
        ("https://a.example\n", "scheme, host"),
        ("https://a.example,https://b.example", "scheme, host"),
    ],
)
def test_what_no_browser_sends_is_refused_with_what_would_do(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        normal_origin(text)
