"""Spellings of a path that clients send: none of them bypasses a check of its route."""

import asyncio
from dataclasses import replace
from itertools import product

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.http.access.route_paths import RoutePaths
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call, error
from tests.support.http.scripted_service import API_KEY, OPTIONS, ScriptedService
from tests.support.http.served_app import served

KEYED = replace(OPTIONS, api_key=API_KEY)
NAMED = HttpOptions(
    served_model_name="chat",
    served_aliases=("org/name", "gpt-4o"),
    own_model_names=("/models/folder", "folder"),
)
APP = create_app(ScriptedService(), OPTIONS, FakeTextModel(512))
ROUTES = [route for route in APP.routes if isinstance(route, APIRoute)]
PATHS = RoutePaths(route.path for route in ROUTES)
PLAIN = sorted({route.path for route in ROUTES if "{" not in route.path})
GETS = sorted({r.path for r in ROUTES if "GET" in r.methods and "{" not in r.path})


def spellings(path: str) -> list[str]:
    short = [path.removeprefix("/v1")] if path.startswith("/v1/") else []
    return [
        variant
        for plain in (path, *short)
        for variant in (plain, f"{plain}/", f"/{plain}", f"{plain}//", plain.replace("/", "//"))
    ]


@pytest.mark.parametrize("path", PLAIN)
def test_every_route_is_known_with_slashes_too_many_and_without_its_version(path: str) -> None:
    assert {PATHS.canonical(spelling) for spelling in spellings(path)} == {path}


@pytest.mark.parametrize("path", ["/", "", "/nothing", "/v1", "/chat", "/v2/models", "/workers/0"])
def test_other_paths_stay_what_they_are(path: str) -> None:
    assert PATHS.canonical(path) == (path or "/")


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/models/org/name", "/v1/models/org/name"),
        ("//v1//models/org/name", "/v1/models/org/name"),
        ("/v1/models//models/folder", "/v1/models//models/folder"),
        ("/v1/models/a//b/", "/v1/models/a//b/"),
        ("/v1/models//", "/v1/models"),
    ],
)
def test_the_name_of_a_model_keeps_its_slashes(path: str, canonical: str) -> None:
    assert PATHS.canonical(path) == canonical


@given(st.text(st.sampled_from("/v1models.chat%\n"), max_size=24) | st.text(max_size=24))
def test_a_canonical_path_is_its_own(path: str) -> None:
    once = PATHS.canonical(path)
    assert PATHS.canonical(once) == once


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_post_is_answered_at_every_spelling_without_a_redirect(path: str) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    for spelling in spellings(path):
        response = call(ScriptedService(), "POST", f"http://test{spelling}", json=body)
        assert response.status_code == 200, spelling
        assert not response.history


@pytest.mark.parametrize("options", [KEYED, replace(KEYED, open_metadata=True)])
def test_no_spelling_needs_less_than_its_route(options: HttpOptions) -> None:
    """With a key, on the loopback address, from a foreign page: as the route itself, each time."""
    app = create_app(ScriptedService(), options, FakeTextModel(512))

    async def run() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport) as client:
            for path, method in product(PLAIN, ("GET", "POST")):
                for headers in ({}, {"host": "evil.com"}, {"origin": "https://evil.com"}):
                    urls = [
                        f"http://test{spelling}"
                        for spelling in (path, f"/{path}/", path.removeprefix("/v1"))
                    ]
                    seen = {
                        (await client.request(method, url, headers=headers)).status_code
                        for url in urls
                    }
                    assert len(seen) == 1, (path, method, headers, seen)

    asyncio.run(run())


async def raw(port: int, request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and everything after them until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, dict(line.lower().split(b": ", 1) for line in lines), body


def request(method: str, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


def test_head_has_the_headers_of_get_and_no_body() -> None:
    async def run() -> None:
        async with asyncio.timeout(60), served(ScriptedService()) as port:
            for path in (*GETS, "/v1/models/demo/fake", "/v1/models/nobody", "/models/"):
                status, got, body = await raw(port, request("GET", path))
                head_status, headed, nothing = await raw(port, request("HEAD", path))
                assert head_status == status, path
                assert nothing == b"", path
                for name in (b"content-type", b"allow", b"retry-after"):
                    assert headed.get(name) == got.get(name), (path, name)
                # Times are in some, whose digits vary from one answer to the next.
                assert abs(int(headed[b"content-length"]) - len(body)) < len(body) / 20 + 8, path
                assert int(headed[b"content-length"]) > 0 < len(body)
            status, headers, nothing = await raw(port, request("HEAD", CHAT))
            assert (status.split()[1], headers[b"allow"], nothing) == (b"405", b"post", b"")
            _, headers, _ = await raw(port, request("DELETE", "/v1/models"))
            assert headers[b"allow"] == b"get, head"

    asyncio.run(run())


def test_raw_spellings_reach_their_routes() -> None:
    async def run() -> None:
        async with asyncio.timeout(60), served(ScriptedService()) as port:
            for path in (
                "//v1/models",
                "/models/",
                "/%2fv1/models",
                "/v1/models?x=1",
                "/v1//models/",
            ):
                status, _, _ = await raw(port, request("GET", path))
                assert status.split()[1] == b"200", path

    asyncio.run(run())


def get(path: str) -> httpx.Response:
    return call(ScriptedService(), "GET", f"http://test{path}", options=NAMED)


def test_all_served_names_are_listed_and_answers_carry_the_first() -> None:
    cards = get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["chat", "org/name", "gpt-4o"]
    assert {card["root"] for card in cards} == {"fake"}
    for name in (*(card["id"] for card in cards), "folder", "/models/folder", None, ""):
        body = {"messages": HI, "model": name}
        response = call(ScriptedService(), "POST", CHAT, options=NAMED, json=body)
        assert response.json()["model"] == "chat"
    assert get("/server_info").json()["served_model_name"] == "chat"


@pytest.mark.parametrize("name", ["chat", "org/name", "gpt-4o", "folder", "/models/folder"])
def test_each_name_has_a_card_at_every_spelling(name: str) -> None:
    quoted = name.replace("/", "%2F")
    for path in (f"/v1/models/{name}", f"/models/{name}/", f"//v1/models/{quoted}"):
        response = get(path)
        assert response.status_code == 200, path
        assert response.json()["id"] == name


@pytest.mark.parametrize("name", ["Chat", "org", "name", "org//name", "models/folder/x", "fake"])
def test_another_name_is_unknown_and_told_what_there_is(name: str) -> None:
    found = error(get(f"/v1/models/{name}"), 404)
    assert found["code"] == "model_not_found"
    assert "this server has 'chat', 'org/name', 'gpt-4o'" in found["message"]
    body = {"messages": HI, "model": name}
    error(call(ScriptedService(), "POST", CHAT, options=NAMED, json=body), 404)
