"""Pages of strangers do not reach a local endpoint, whatever their host names resolve to."""

import re
from dataclasses import replace

import pytest

from mlx_dp.orchestrator.http.access.host_policy import HostPolicy
from mlx_dp.orchestrator.options import HttpOptions
from tests.support.http.http_calls import CHAT, HI, call, error
from tests.support.http.scripted_service import OPTIONS, ScriptedService

LOOPBACK = HostPolicy(["llm.example.com"], loopback=True, hostname="Studio.lan")


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"localhost:8000",
        b"LOCALHOST.:8000",
        b"app.localhost",
        b"127.0.0.1:8000",
        b"127.8.8.8",
        b"[::1]:8000",
        b"192.168.1.7:8000",
        b"mlx_dp",
        b"llm.example.com",
        b"LLM.Example.com:443",
        b"host.docker.internal:8000",
        b"host.containers.internal",
        b"studio",
        b"studio.local:8000",
        b"Studio.Local.",
        b"studio.lan",
        b"",
    ],
)
def test_own_names_and_addresses_are_allowed(host: bytes) -> None:
    assert LOOPBACK.objection({b"host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        b"evil.com",
        b"evil.com:8000",
        b"evil.com.",
        b"127.0.0.1.evil.com",
        b"127.0.0.1.nip.io:8000",
        b"localhost.evil.com",
        b"x.llm.example.com",
        b"evil.com\xff",
        b"1.2.3",
        b"other.local",
        b"studio.local.evil.com",
        b"x.host.docker.internal",
        b"docker.internal",
    ],
)
def test_a_name_that_a_stranger_can_point_here_is_refused(host: bytes) -> None:
    said = LOOPBACK.objection({b"host": host})
    assert said is not None
    assert "--allowed-host" in said
    assert said.isascii()


@pytest.mark.parametrize(
    "origin",
    [
        b"http://evil.com",
        b"https://evil.com:8000",
        b"null",
        b"http://8.8.8.8",
        b"http://[bad",
        b"http://studio.local",
        b"http://host.docker.internal:3000",
        b"",
    ],
)
def test_a_page_of_another_site_is_refused(origin: bytes) -> None:
    refused = LOOPBACK.objection({b"host": b"localhost", b"origin": origin})
    assert (refused is None) is (origin == b"")


def test_a_machine_without_a_name_adds_none() -> None:
    nameless = HostPolicy([], loopback=True)
    assert nameless.objection({b"host": b".local"}) is not None
    assert nameless.objection({b"host": b"evil.com"}) is not None


@pytest.mark.parametrize(
    "origin",
    [
        b"http://localhost:3000",
        b"http://127.0.0.1:3000",
        b"http://[::1]:3000",
        b"https://llm.example.com",
        b"app://obsidian.md",
        b"tauri://localhost",
    ],
)
def test_pages_and_applications_of_this_machine_are_allowed(origin: bytes) -> None:
    assert LOOPBACK.objection({b"host": b"localhost", b"origin": origin}) is None


def test_an_image_of_another_site_is_refused() -> None:
    site = {b"host": b"localhost", b"sec-fetch-site": b"cross-site"}
    assert LOOPBACK.objection(site) is not None
    assert LOOPBACK.objection({**site, b"sec-fetch-site": b"none"}) is None


@pytest.mark.parametrize(
    "policy", [HostPolicy([], loopback=False), HostPolicy(["*"], loopback=True)]
)
def test_other_networks_and_a_star_are_not_checked(policy: HostPolicy) -> None:
    assert policy.objection({b"host": b"evil.com", b"origin": b"http://evil.com"}) is None


@pytest.mark.parametrize(("method", "path"), [("GET", "/live"), ("POST", CHAT), ("GET", "/x")])
def test_dns_rebinding_reaches_no_route(method: str, path: str) -> None:
    service = ScriptedService()
    headers = {"host": "evil.com"}
    response = call(service, method, path, headers=headers, json={"messages": HI})
    found = error(response, 403)
    assert found["code"] == "host_not_allowed"
    assert not service.answers


def test_a_proxys_name_can_be_allowed() -> None:
    options = HttpOptions(served_model_name="m", allowed_hosts=("llm.example.com",))
    headers = {"host": "llm.example.com"}
    assert call(ScriptedService(), "GET", "/live", options=options, headers=headers).is_success


def test_no_origin_is_ever_reflected() -> None:
    options = HttpOptions(served_model_name="m", host="0.0.0.0")
    for origin in ("http://localhost:3000", "https://evil.com", "null"):
        for method in ("GET", "OPTIONS", "POST"):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            for path in ("/v1/models", "/health", CHAT):
                response = call(ScriptedService(), method, path, options=options, headers=headers)
                assert not [
                    name
                    for name, value in response.headers.items()
                    if name.startswith("access-control") or origin in value
                ]
    assert OPTIONS.allowed_hosts == ()


def test_the_advice_of_a_refusal_works_when_it_is_followed() -> None:
    page = {"origin": "https://Chat.Example.com:443"}
    sent = {"origin": "https://chat.example.com"}
    refused = error(call(ScriptedService(), "GET", "/v1/models", headers=sent), 403)
    advised = re.search(r"--cors-origin (\S+)", refused["message"])
    assert advised is not None
    options = replace(OPTIONS, cors_origins=(advised[1],))
    allowed = call(ScriptedService(), "GET", "/v1/models", headers=sent, options=options)
    assert allowed.is_success
    assert allowed.headers["access-control-allow-origin"] == sent["origin"]
    # No browser writes it so.
    assert call(ScriptedService(), "GET", "/v1/models", headers=page, options=options).is_error

    named = {"host": "llm.example.com:8000"}
    refused = error(call(ScriptedService(), "GET", "/v1/models", headers=named), 403)
    advised = re.search(r"--allowed-host (\S+)", refused["message"])
    assert advised is not None
    options = replace(OPTIONS, allowed_hosts=(advised[1],))
    assert call(ScriptedService(), "GET", "/v1/models", headers=named, options=options).is_success


@pytest.mark.parametrize(
    ("headers", "path", "advice"),
    [
        ({"origin": "null"}, "/v1/models", "serve the page over HTTP"),
        ({"origin": "https://a.example"}, "/workers", "not this one"),
        ({"sec-fetch-site": "cross-site"}, "/v1/models", "with fetch()"),
    ],
)
def test_what_no_flag_allows_is_not_advised(
    headers: dict[str, str], path: str, advice: str
) -> None:
    options = replace(OPTIONS, cors_origins=("https://a.example",))
    found = error(call(ScriptedService(), "GET", path, headers=headers, options=options), 403)
    assert advice in found["message"]
