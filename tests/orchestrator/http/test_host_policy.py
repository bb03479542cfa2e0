"""Pages of strangers do not reach an endpoint of this machine, whatever their names point at."""

import pytest
from http_calls import CHAT, HI, call, error
from scripted_service import OPTIONS, ScriptedService

from mlx_dp.orchestrator.http.host_policy import HostPolicy
from mlx_dp.orchestrator.options import HttpOptions

LOOPBACK = HostPolicy(["llm.example.com"], loopback=True)


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
    ],
)
def test_a_name_that_a_stranger_can_point_here_is_refused(host: bytes) -> None:
    said = LOOPBACK.objection({b"host": host})
    assert said is not None
    assert "--allowed-host" in said
    assert said.isascii()


@pytest.mark.parametrize(
    "origin",
    [b"http://evil.com", b"https://evil.com:8000", b"null", b"http://8.8.8.8", b"http://[bad", b""],
)
def test_a_page_of_another_site_is_refused(origin: bytes) -> None:
    refused = LOOPBACK.objection({b"host": b"localhost", b"origin": origin})
    assert (refused is None) is (origin == b"")


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
