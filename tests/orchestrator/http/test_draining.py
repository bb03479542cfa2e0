"""Responses during a drain end their connection, so that clients move on."""

from dataclasses import replace

import httpx
import pytest

from mlx_dp.orchestrator.api import Generation, ServiceState, ServiceStatus
from mlx_dp.orchestrator.options import HttpOptions
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call
from tests.support.http.scripted_service import API_KEY, STATE, ScriptedService, says

PATHS = (
    ("GET", "/live"),
    ("GET", "/health"),
    ("HEAD", "/health"),
    ("GET", "/health_generate"),
    ("GET", "/health_generate?dp_rank=0"),
    ("GET", "/health_generate?dp_rank=9"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/unknown"),
    ("GET", "/v1/loads"),
    ("GET", "/server_info"),
    ("GET", "/workers"),
    ("POST", "/flush_cache"),
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("GET", CHAT),
    ("GET", "/unknown"),
    ("GET", "/openapi.json"),
)
KEYED = HttpOptions(served_model_name="m", api_key=API_KEY)


def connection(response: httpx.Response) -> list[str]:
    return response.headers.get_list("connection")


def in_state(status: ServiceStatus) -> ScriptedService:
    service = ScriptedService()
    service.current = replace(STATE, status=status)
    return service


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_route_ends_its_connection_in_a_drain_only(method: str, path: str) -> None:
    body = {"json": {}} if method == "POST" else {}
    for status in (ServiceStatus.DRAINING, ServiceStatus.DEAD):
        assert connection(call(in_state(status), method, path, **body)) == ["close"], status
    for status in (ServiceStatus.READY, ServiceStatus.STARTING, ServiceStatus.RESTARTING):
        assert connection(call(in_state(status), method, path, **body)) == [], status


@pytest.mark.parametrize("body", [{"messages": HI}, {"messages": HI, "stream": True}, {}])
def test_refusals_end_their_connection(body: dict[str, object]) -> None:
    response = call(in_state(ServiceStatus.DRAINING), "POST", CHAT, json=body)
    assert response.status_code == 503
    assert connection(response) == ["close"]


def test_what_never_comes_to_a_route_ends_its_connection() -> None:
    unknown = call(in_state(ServiceStatus.DRAINING), "POST", CHAT, options=KEYED, json={})
    assert (unknown.status_code, connection(unknown)) == (401, ["close"])
    headers = {"host": "evil.example.com"}
    foreign = call(in_state(ServiceStatus.DRAINING), "GET", "/live", headers=headers)
    assert (foreign.status_code, connection(foreign)) == (403, ["close"])


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_begin_before_the_drain_and_are_said_in_it_end_their_connection(
    stream: bool,
) -> None:
    class Drains(ScriptedService):
        def submit(self, generation: Generation) -> object:
            answer = super().submit(generation)
            self.current = replace(self.current, status=ServiceStatus.DRAINING)
            return answer

    service = Drains(lambda _: says("x"))
    response = call(service, "POST", CHAT, json={"messages": HI, "stream": stream})
    assert response.status_code == 200
    assert connection(response) == ["close"]


def test_an_internal_error_ends_its_connection_in_a_drain_too() -> None:
    class Broken(ScriptedService):
        def workers(self) -> object:
            raise ValueError

        def state(self) -> ServiceState:
            return replace(self.current, status=ServiceStatus.DRAINING)

    response = call(Broken(), "GET", "/workers")
    assert (response.status_code, connection(response)) == (500, ["close"])
