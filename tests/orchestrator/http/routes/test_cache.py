"""POST /flush_cache: one result per owner, and 200 only when all have answered."""

from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import FlushOutcome, OwnerFlush
from mlx_dp.orchestrator.options import HttpOptions
from tests.support.http.http_calls import call
from tests.support.http.scripted_service import ScriptedService


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_it_lists_what_each_owner_has_freed(method: str) -> None:
    response = call(ScriptedService(), method, "/flush_cache")
    assert response.status_code == 200
    assert response.json() == {
        "success": True,
        "num_tokens": 20,
        "nbytes": 1280,
        "owners": [
            {"dp_rank": 0, "outcome": "flushed", "num_tokens": 10, "nbytes": 640},
            {"dp_rank": 1, "outcome": "flushed", "num_tokens": 10, "nbytes": 640},
        ],
    }


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(FlushOutcome.TIMEOUT, 503), (FlushOutcome.LOST, 503), (FlushOutcome.NOT_READY, 200)],
)
def test_an_owner_that_was_asked_and_did_not_answer_makes_it_a_503(
    outcome: FlushOutcome, status: int
) -> None:
    service = ScriptedService()
    service.flushes = (service.flushes[0], OwnerFlush(owner=1, outcome=outcome))
    response = call(service, "POST", "/flush_cache")
    assert response.status_code == status
    assert ("retry-after" in response.headers) == (status == 503)
    body = response.json()
    assert body["success"] == (status == 200)
    assert [owner["outcome"] for owner in body["owners"]] == ["flushed", outcome.value]


def test_without_any_ready_owner_it_is_a_503() -> None:
    service = ScriptedService()
    service.flushes = tuple(
        replace(flush, outcome=FlushOutcome.NOT_READY) for flush in service.flushes
    )
    assert call(service, "POST", "/flush_cache").status_code == 503


def test_the_owners_have_as_long_as_the_options_say() -> None:
    asked: list[float] = []

    class Asked(ScriptedService):
        async def flush_cache(self, timeout_s: float) -> tuple[OwnerFlush, ...]:
            asked.append(timeout_s)
            return self.flushes

    options = HttpOptions(served_model_name="m", flush_timeout_s=0.25)
    call(Asked(), "POST", "/flush_cache", options=options)
    assert asked == [0.25]


def test_both_methods_are_in_the_document_of_the_interface() -> None:
    response = call(ScriptedService(), "GET", "/openapi.json")
    assert response.status_code == 200, response.text
    assert response.json()["paths"]["/flush_cache"].keys() == {"get", "post"}
