"""Health, loads, metrics, models: the routes of load balancers; and which need the key."""

import logging
import os
from dataclasses import replace
from unittest.mock import ANY

import pytest
from fastapi.routing import APIRoute

from mlx_dp.orchestrator.api import ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.proto.capacity.model_shape import ModelShape
from tests.support.control.owner_states import LOADING
from tests.support.http.http_calls import CHAT, call, error
from tests.support.http.scripted_service import API_KEY, STATE, ScriptedService

KEYED = HttpOptions(served_model_name="m", api_key=API_KEY)


def get(path: str, service: ScriptedService | None = None) -> object:
    response = call(service or ScriptedService(), "GET", path)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("status", ServiceStatus)
def test_health_is_200_only_when_ready_and_live_always(status: ServiceStatus) -> None:
    service = ScriptedService()
    service.current = replace(STATE, status=status)
    response = call(service, "GET", "/health")
    assert response.status_code == (200 if status is ServiceStatus.READY else 503)
    assert response.json()["status"] == status.value
    if response.status_code == 503:
        assert status.value in response.json()["reason"]
        assert "retry-after" in response.headers
    assert call(service, "GET", "/live").status_code == 200


@pytest.mark.parametrize("down", [WorkerStatus.LOST, WorkerStatus.FAILED])
def test_health_says_that_an_owner_is_missing_and_is_200_while_others_serve(
    down: WorkerStatus,
) -> None:
    service = ScriptedService(owners=(STATE.owners[0], replace(STATE.owners[1], status=down)))
    response = call(service, "GET", "/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "degraded",
        "owners": {"0": "ready", "1": down.value},
    }


@pytest.mark.parametrize(
    ("overdue", "status", "word"),
    [
        ((False, False), 200, "ready"),
        ((True, False), 200, "degraded"),
        ((True, True), 503, "unresponsive"),
    ],
)
def test_health_is_503_while_every_owner_is_overdue(
    overdue: tuple[bool, bool], status: int, word: str
) -> None:
    owners = (replace(each, overdue=late) for each, late in zip(STATE.owners, overdue, strict=True))
    response = call(ScriptedService(owners=tuple(owners)), "GET", "/health")
    assert (response.status_code, response.json()["status"]) == (status, word)
    if status == 503:
        assert "progress" in response.json()["reason"]
        assert "retry-after" in response.headers


def test_an_owner_that_is_lost_does_not_count_where_the_other_is_overdue() -> None:
    lost = replace(STATE.owners[0], status=WorkerStatus.LOST)
    owners = (lost, replace(STATE.owners[1], overdue=True))
    assert call(ScriptedService(owners=owners), "GET", "/health").status_code == 503


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_health_answers_balancers_that_do_not_get(method: str) -> None:
    assert call(ScriptedService(), method, "/health").status_code == 200


def test_models_have_what_routers_read() -> None:
    body = get("/v1/models")
    assert isinstance(body, dict)
    (card,) = body["data"]
    assert card["id"] == "demo/fake"
    assert card["root"] == "fake"
    assert card["max_model_len"] == 512
    assert card["owned_by"] == "sglang"
    # Two apps, which may be of different seconds.
    assert get("/v1/models/demo/fake") == card | {"created": ANY}
    error(call(ScriptedService(), "GET", "/v1/models/..%2fx"), 404)


def test_loads_are_per_owner_and_the_queue_is_in_the_aggregate() -> None:
    busy = replace(
        STATE.owners[0],
        running=4,
        prompt_tokens_total=400,
        cached_tokens_total=100,
        used_tokens=250,
        reserved_tokens=400,
        prefix_tokens=300,
        prefix_nbytes=19200,
        held_nbytes=35200,
        held_buffers=5838,
        buffer_limit=249_500,
        capacity=replace(STATE.owners[0].capacity, cache_nbytes=64000),
        generation_tokens_per_s=9.0,
    )
    service = ScriptedService(owners=(busy, STATE.owners[1]))
    service.current = replace(service.current, queued_requests=3, queued_tokens=70)
    body = get("/v1/loads?include=core,disagg,queues,memory", service)
    assert isinstance(body, dict)
    assert body["dp_rank_count"] == 2
    first, second = body["loads"]
    expected = {
        "dp_rank": 0,
        "num_running_reqs": 4,
        "num_waiting_reqs": 0,
        "num_waiting_uncached_tokens": 0,
        "num_total_reqs": 4,
        "num_used_tokens": 250,
        "num_total_tokens": 250,
        "max_total_num_tokens": 1000,
        "token_usage": 0.25,
        "gen_throughput": 9.0,
        "cache_hit_rate": 0.25,
        "prefix_cache_tokens": 300,
        "prefix_cache_nbytes": 19200,
        "held_nbytes": 35200,
        "held_buffers": 5838,
        "buffer_limit": 249_500,
        "budget_nbytes": 64000,
        "utilization": 0.5,
        "max_running_requests": 8,
    }
    assert expected.items() <= first.items()
    assert second["num_running_reqs"] == 0
    assert second["budget_nbytes"] is second["buffer_limit"] is None
    aggregate = body["aggregate"]
    assert aggregate["num_waiting_reqs"] == aggregate["total_waiting_reqs"] == 3
    assert aggregate["num_total_tokens"] == aggregate["total_tokens"] == 320
    assert aggregate["max_running_requests"] == 16
    assert aggregate["cache_hit_rate"] == 0.25
    loads = get("/get_load", service)
    assert isinstance(loads, list)
    assert {"dp_rank": 0, "num_reqs": 4, "num_waiting_reqs": 0, "num_tokens": 250}.items() <= loads[
        0
    ].items()


def test_server_and_model_info_have_two_addresses_each() -> None:
    info = get("/server_info")
    assert isinstance(info, dict)
    assert info == get("/get_server_info")
    assert info["dp_size"] == 2
    assert info["tp_size"] == 1
    assert info["max_running_requests"] == 8
    assert info["max_total_num_tokens"] == 1000
    assert info["served_model_name"] == "demo/fake"
    assert [owner["status"] for owner in info["owners"]] == ["ready", "ready"]
    assert get("/model_info") == get("/get_model_info")
    assert get("/version").keys() == {"version"}


def test_server_info_tells_what_each_owner_holds_and_what_it_had_to_give_up() -> None:
    busy = replace(
        STATE.owners[0],
        prefix_tokens=300,
        prefix_nbytes=19200,
        held_nbytes=35200,
        held_buffers=5838,
        buffer_limit=249_500,
        prompt_tokens_total=400,
        cached_tokens_total=100,
        preemptions_total=3,
    )
    info = get("/server_info", ScriptedService(owners=(busy,)))
    assert isinstance(info, dict)
    expected = {
        "prefix_cache_tokens": 300,
        "prefix_cache_nbytes": 19200,
        "held_nbytes": 35200,
        "held_buffers": 5838,
        "buffer_limit": 249_500,
        "budget_nbytes": None,
        "prompt_tokens_total": 400,
        "cached_tokens_total": 100,
        "preemptions_total": 3,
    }
    assert expected.items() <= info["owners"][0].items()


def test_server_info_has_the_internal_state_of_each_owner_as_sglang_names_it() -> None:
    shape = ModelShape(
        num_layers=2,
        attention_layers=2,
        auxiliary_layers=0,
        kv_bytes_per_token=5_000_000,
        auxiliary_bytes_per_slot=0,
        vocab_size=9,
        context_length=512,
        weights_nbytes=2_540_000_000,
    )
    loaded = replace(STATE.owners[0], shape=shape, generation_tokens_per_s=12.5)
    starting = replace(LOADING, dp_rank=1)
    info = get("/server_info", ScriptedService(owners=(loaded, starting)))
    assert isinstance(info, dict)
    first, second = info["internal_states"]
    assert first == {
        "dp_rank": 0,
        "last_gen_throughput": 12.5,
        "effective_max_running_requests_per_dp": 8,
        "max_total_num_tokens": 1000,
        "memory_usage": {"weight": 2.54, "kvcache": 5.0, "token_capacity": 1000, "graph": 0.0},
    }
    assert second["dp_rank"] == 1
    assert second["effective_max_running_requests_per_dp"] == 0
    assert second["memory_usage"]["token_capacity"] == 0


def routes() -> list[tuple[str, str]]:
    app = create_app(ScriptedService(), KEYED, FakeTextModel(512))
    found = [
        (method, route.path.replace("{name:path}", "m"))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or {"GET"})
        if isinstance(route, APIRoute) or hasattr(route, "path")
    ]
    assert len(found) > 15
    return found


@pytest.mark.parametrize(("method", "path"), [*routes(), ("GET", "/nothing"), ("GET", "/healthy")])
def test_every_route_but_three_needs_the_key(method: str, path: str) -> None:
    response = call(ScriptedService(), method, path, options=KEYED)
    if path in ("/live", "/health", "/metrics"):
        assert response.status_code != 401
    else:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), [*routes(), ("GET", "/nothing"), ("GET", "/v1")])
def test_open_metadata_opens_what_routers_read_and_nothing_else(method: str, path: str) -> None:
    options = replace(KEYED, open_metadata=True)
    status = call(ScriptedService(), method, path, options=options).status_code
    named = ("/v1/models", "/v1/models/m", "/v1/loads", "/get_load", "/version")
    infos = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")
    is_open = path in ("/live", "/health", "/metrics", *named, *infos)
    assert (status != 401) is is_open


@pytest.mark.parametrize("path", ["/v1/models", "/v1/loads", "/server_info", "/v1/models/m"])
def test_open_metadata_is_for_reading(path: str) -> None:
    options = replace(KEYED, open_metadata=True)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert call(ScriptedService(), method, path, options=options).status_code == 401


@pytest.mark.parametrize("name", ["..", "m/../x", "~", "%2e%2e", "m%00", "M", "m/x", "%2e", "m?x"])
def test_only_the_exact_name_is_a_model(name: str) -> None:
    options = HttpOptions(served_model_name="m")
    # Escaped in full, or the client would resolve it.
    escaped = "".join(f"%{byte:02x}" for byte in name.encode())
    response = call(ScriptedService(), "GET", f"/v1/models/{escaped}", options=options)
    assert response.status_code == 404
    body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
    response = call(ScriptedService(), "POST", CHAT, options=options, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer " + API_KEY.encode(), 200),
        (b"bearer " + API_KEY.encode(), 200),
        (b"Bearer " + API_KEY.encode() + b"x", 401),
        (b"Bearer " + API_KEY.encode()[:-1], 401),
        (b"Bearer", 401),
        (b"", 401),
        (b"Basic " + API_KEY.encode(), 401),
        (API_KEY.encode(), 401),
        (b"Bearer \xff\xfe\x80", 401),
        (b"Bearer ' OR 1=1 --", 401),
    ],
)
def test_key_is_compared_as_bytes(header: bytes, status: int) -> None:
    response = call(
        ScriptedService(), "GET", "/v1/models", options=KEYED, headers={b"authorization": header}
    )
    assert response.status_code == status
    assert response.headers.get("connection") == ("close" if status == 401 else None)


@pytest.mark.parametrize(
    ("key", "sent"),
    [("k1\n", b"k1"), (" k1 ", b"k1"), (os.fsdecode(b"k\xff\xfe"), b"k\xff\xfe")],
    ids=["line break", "spaces", "no UTF-8"],
)
def test_key_is_what_its_file_says_but_for_space_around_it(key: str, sent: bytes) -> None:
    options = replace(KEYED, api_key=key)
    headers = {b"authorization": b"Bearer " + sent}
    response = call(ScriptedService(), "GET", "/v1/models", options=options, headers=headers)
    assert response.status_code == 200


def test_neither_keys_nor_prompts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    secret = "sesame-4711"
    options = replace(KEYED, api_key=secret)
    for key in (secret, secret + "x"):
        headers = {"authorization": f"Bearer {key}"}
        for failing in (False, True):
            service = ScriptedService()
            if failing:
                service.reply = lambda _: 1 / 0
            with caplog.at_level(logging.DEBUG):
                call(
                    service,
                    "POST",
                    CHAT,
                    options=options,
                    headers=headers,
                    json={"messages": [{"role": "user", "content": "sesame prompt"}]},
                )
    assert "sesame" not in caplog.text
    assert "sesame" not in repr(options)
