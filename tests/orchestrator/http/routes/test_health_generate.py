"""GET /health_generate: the owners that generate, all of them or a requested one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import (
    Ended,
    Generation,
    OwnerState,
    ServiceState,
    ServiceStatus,
    StreamEvent,
    WorkerStatus,
)
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.owner_states import LOADING
from tests.support.http.http_calls import call, error
from tests.support.http.scripted_service import STATE, ScriptedService, granted, says

PATH = "/health_generate"


def owners(*status: WorkerStatus) -> tuple[OwnerState, ...]:
    return tuple(
        replace(STATE.owners[0], dp_rank=rank, status=each) for rank, each in enumerate(status)
    )


class Busy(ScriptedService):
    """Its owners have one more token at each look."""

    def state(self) -> ServiceState:
        owners = tuple(
            replace(o, generated_tokens_total=o.generated_tokens_total + 1)
            for o in self.current.owners
        )
        self.current = replace(self.current, owners=owners)
        return self.current


def breaks(*ranks: int) -> ScriptedService:
    """Two owners, of which these generate nothing."""

    def reply(generation: Generation) -> Sequence[StreamEvent]:
        if generation.routed_dp_rank in ranks:
            return [granted(1), Ended(reason=FinishReason.ERROR, message="it broke")]
        return says("x")

    return ScriptedService(reply)


def test_every_ready_owner_is_asked_for_one_token() -> None:
    service = ScriptedService(owners=(*STATE.owners, replace(LOADING, dp_rank=2)))
    response = call(service, "GET", PATH)
    assert response.status_code == 200
    body = response.json()
    assert (body["status"], body["reason"]) == ("healthy", "")
    assert [rank["ok"] for rank in body["ranks"]] == [True, True, False]
    assert [a.generation.routed_dp_rank for a in service.answers] == [0, 1]
    assert all(a.generation.max_tokens == 1 for a in service.answers)
    assert all(a.completed for a in service.answers)


def test_an_owner_that_does_not_answer_beside_one_that_does_is_degraded() -> None:
    response = call(breaks(1), "GET", PATH)
    assert response.status_code == 200
    body = response.json()
    assert body["status"] == "degraded"
    assert body["reason"] == "rank 1: it broke"
    assert [(rank["ok"], rank["reason"]) for rank in body["ranks"]] == [
        (True, ""),
        (False, "it broke"),
    ]


@pytest.mark.parametrize("down", [WorkerStatus.LOST, WorkerStatus.FAILED])
def test_it_is_degraded_whenever_health_is(down: WorkerStatus) -> None:
    service = ScriptedService(owners=owners(WorkerStatus.READY, down))
    for path in ("/health", PATH):
        response = call(service, "GET", path)
        assert response.status_code == 200
        assert response.json()["status"] == "degraded", path
    assert response.json()["reason"] == f"rank 1: the owner is {down.value}"


def test_an_owner_that_loads_again_is_missing_until_it_serves() -> None:
    again = replace(LOADING, dp_rank=2, message="killed by SIGKILL")
    service = ScriptedService(owners=(*STATE.owners, again))
    for path in ("/health", PATH):
        response = call(service, "GET", path)
        assert response.status_code == 200
        assert response.json()["status"] == "degraded", path
    assert response.json()["reason"] == "rank 2: the owner is starting (killed by SIGKILL)"


def test_it_is_503_only_when_no_owner_answers() -> None:
    response = call(breaks(0, 1), "GET", PATH)
    assert response.status_code == 503
    assert response.json()["status"] == "unhealthy"
    assert response.json()["reason"] == "rank 0: it broke; rank 1: it broke"
    assert "retry-after" in response.headers


@pytest.mark.parametrize("status", [s for s in ServiceStatus if s is not ServiceStatus.READY])
def test_it_is_503_whenever_health_is_and_sends_no_request(status: ServiceStatus) -> None:
    service = ScriptedService()
    service.current = replace(STATE, status=status)
    for path in ("/health", PATH, f"{PATH}?dp_rank=0"):
        response = call(service, "GET", path)
        assert response.status_code == 503, path
        assert status.value in response.json()["reason"]
    assert not service.answers


def test_one_rank_is_asked_alone() -> None:
    service = breaks(1)
    response = call(service, "GET", f"{PATH}?dp_rank=0")
    assert response.status_code == 200
    assert response.json() == {
        "status": "healthy",
        "ranks": [{"dp_rank": 0, "status": "ready", "ok": True, "reason": ""}],
        "reason": "",
    }
    assert service.generation.routed_dp_rank == 0


def test_one_rank_that_does_not_answer_is_503_whatever_the_others_do() -> None:
    response = call(breaks(1), "GET", f"{PATH}?dp_rank=1")
    assert response.status_code == 503
    assert response.json()["reason"] == "rank 1: it broke"


@pytest.mark.parametrize("status", [WorkerStatus.STARTING, WorkerStatus.LOST])
def test_one_rank_that_is_not_ready_is_503(status: WorkerStatus) -> None:
    service = ScriptedService(owners=owners(WorkerStatus.READY, status))
    response = call(service, "GET", f"{PATH}?dp_rank=1")
    assert response.status_code == 503
    assert response.json()["reason"] == f"rank 1: the owner is {status.value}"
    assert not service.answers


@pytest.mark.parametrize("rank", ["2", "-1", "", "x", "1.0", "\u0661", "9" * 5000, "0x1", " 1"])
def test_a_rank_that_does_not_exist_is_400_with_the_range(rank: str) -> None:
    service = ScriptedService()
    found = error(call(service, "GET", PATH, params={"dp_rank": rank}), 400)
    assert found["param"] == "dp_rank"
    assert "use a rank from 0 to 1" in found["message"]
    assert len(found["message"]) < 200
    assert not service.answers


def test_it_has_a_deadline_but_takes_progress_for_health() -> None:
    options = HttpOptions(served_model_name="m", probe_timeout_s=0.01)
    silent = ScriptedService(lambda _: [])
    response = call(silent, "GET", PATH, options=options)
    assert response.status_code == 503
    assert "rank 0: no token within 0.01 s" in response.json()["reason"]
    assert all(answer.cancelled.is_set() for answer in silent.answers)
    assert call(Busy(lambda _: []), "GET", PATH, options=options).is_success


def test_a_full_queue_is_no_illness_while_tokens_come() -> None:
    options = HttpOptions(served_model_name="m", probe_timeout_s=0.01)
    for service, status in ((Busy(), 200), (ScriptedService(), 503)):
        service.refuse_from = 0
        response = call(service, "GET", PATH, options=options)
        assert response.status_code == status
    assert "the queue is full" in response.json()["reason"]
