"""GET /workers, POST /workers/{n}/restart and POST /flush_cache."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mlx_dp.orchestrator.api import FlushOutcome, OwnerFlush, WorkerStatus
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.proto.messages.batching import Batching
from tests.support.http.http_calls import call, error
from tests.support.http.scripted_service import STATE, ScriptedService


def test_each_worker_has_an_entry_with_its_process_and_its_past() -> None:
    first, second = STATE.owners
    lost = replace(
        second, status=WorkerStatus.LOST, pid=None, restarts=2, message="killed by SIGSEGV"
    )
    response = call(ScriptedService(owners=(first, lost)), "GET", "/workers")
    assert response.status_code == 200
    ready, gone = response.json()["workers"]
    assert (ready["index"], ready["status"], ready["phase"]) == (0, "ready", "serving")
    assert (ready["last_cause"], ready["restart_asked"]) == (None, False)
    assert (gone["index"], gone["status"], gone["pid"]) == (1, "lost", None)
    assert (gone["epoch"], gone["restarts_in_window"], gone["max_restarts"]) == (2, 2, 5)
    assert gone["last_cause"] == "killed by SIGSEGV"
    age = datetime.now(UTC) - datetime.fromisoformat(gone["since"])
    assert 55.0 < age.total_seconds() < 65.0


def test_a_worker_on_another_machine_says_which_it_is() -> None:
    service = ScriptedService()

    def places() -> list[tuple[bool, str | None]]:
        listed = call(service, "GET", "/workers").json()["workers"]
        return [(worker["remote"], worker["host"]) for worker in listed]

    assert places() == [(False, None), (False, None)]
    service.hosts = {1: "mac2.local"}
    assert places() == [(False, None), (True, "mac2.local")]
    # It waits for a machine to offer it a place.
    service.hosts = {1: None}
    assert places() == [(False, None), (True, None)]


def test_each_worker_says_how_it_batches_or_why_it_does_not() -> None:
    first, second = STATE.owners
    owners = (
        replace(first, batching=Batching.SEVERAL_SLABS),
        replace(second, batching=Batching.ONE_BY_ONE),
    )
    listed = call(ScriptedService(owners=owners), "GET", "/workers").json()["workers"]
    assert [(worker["batching"], worker["unbatched_reason"]) for worker in listed] == [
        ("several_slabs", None),
        ("one_by_one", "no batch"),
    ]


def test_a_restart_is_planned_at_once_and_seen_in_the_list() -> None:
    service = ScriptedService()
    response = call(service, "POST", "/workers/1/restart")
    assert response.status_code == 202
    assert response.json() == {"restarting": [1]}
    listed = call(service, "GET", "/workers").json()["workers"]
    assert [worker["restart_asked"] for worker in listed] == [False, True]


def test_a_restart_that_cannot_begin_is_a_409_with_the_reason() -> None:
    service = ScriptedService()
    call(service, "POST", "/workers/1/restart")
    refused = error(call(service, "POST", "/workers/0/restart"), 409)
    assert refused["code"] == "restart_refused"
    assert refused["message"] == "a restart is under way already"


@pytest.mark.parametrize("name", ["2", "-1", "x", "1e0", "\u0661", "9" * 400, "%00"])
def test_a_worker_that_there_is_not_is_a_404_with_the_ones_there_are(name: str) -> None:
    service = ScriptedService()
    refused = error(call(service, "POST", f"/workers/{name}/restart"), 404)
    assert "workers are 0 to 1" in refused["message"]
    assert len(refused["message"]) < 120
    assert not service.restarting


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
    service.flushes = (service.flushes[0], OwnerFlush(dp_rank=1, outcome=outcome))
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
