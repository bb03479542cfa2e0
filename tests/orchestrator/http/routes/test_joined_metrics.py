"""Pages of metrics that a router joins, from instances in any state."""

from collections.abc import Mapping
from dataclasses import replace

from mlx_dp.orchestrator.api import OwnerState, ServiceStatus, WorkerStatus
from mlx_dp.orchestrator.control.routing.policies import METHODS
from mlx_dp.orchestrator.control.routing.prefix_affinity import PREFIX_AFFINITY
from mlx_dp.proto.messages.events import PassTotals
from tests.support.control.fake_worker import SHAPE
from tests.support.control.owner_states import LOADING, QUEUED, READY
from tests.support.http.http_calls import call
from tests.support.http.metrics_page import assert_joinable
from tests.support.http.scripted_service import STATE, ScriptedService

SERVED = replace(READY, shape=SHAPE, prompt_tokens_total=3, generated_tokens_total=5)
LOST = replace(QUEUED, status=WorkerStatus.LOST, restarts=1, message="exited")
FAILED = replace(LOST, status=WorkerStatus.FAILED)
RANK = replace(SERVED, passes=PassTotals(passes=9, idle_passes=3, waited_s=1.5))
STATES: Mapping[str, tuple[OwnerState, ...]] = {
    "no owner": (),
    "queued": (QUEUED,),
    "loading": (LOADING,),
    "ready": (READY,),
    "served": (SERVED, SERVED),
    "one lost": (SERVED, LOST),
    "all failed": (FAILED, FAILED),
    "a rank without news": (RANK, SERVED),
}


def numbered(owners: tuple[OwnerState, ...]) -> tuple[OwnerState, ...]:
    return tuple(replace(owner, dp_rank=rank) for rank, owner in enumerate(owners))


def page_of(service: ScriptedService) -> str:
    return call(service, "GET", "/metrics").text


def worked(service: ScriptedService) -> ScriptedService:
    """A service that has counted something of each kind."""
    counters = service.totals
    counters.requests_refused["queue_full"] = counters.errors["worker_lost"] = 1
    counters.grants["total_tokens"] = counters.losses["hung"] = 1
    return service


def test_pages_of_all_states_have_a_sample_in_each_family_and_can_be_joined() -> None:
    pages = {}
    for state, owners in STATES.items():
        pages[state] = page_of(ScriptedService(owners=numbered(owners)))
        pages[f"{state}, after work"] = page_of(worked(ScriptedService(owners=numbered(owners))))
    for status in ServiceStatus:
        service = ScriptedService()
        service.current = replace(STATE, status=status)
        pages[status] = page_of(service)
    for method in METHODS:
        service = ScriptedService()
        service.current = replace(STATE, load_balance_method=method)
        pages[method] = page_of(service)
    assert_joinable(pages)


def test_an_unforeseen_label_value_is_added_to_its_family() -> None:
    service = ScriptedService()
    plain = page_of(service)
    service.totals.errors["something_new"] = 3
    page = page_of(service)
    assert 'mlx_dp:request_errors_total{code="something_new"} 3.0' in page
    assert 'mlx_dp:request_errors_total{code="worker_lost"} 0.0' in page
    assert_joinable({"before": plain, "after": page})


def test_grants_begin_with_the_reasons_of_the_method() -> None:
    service = ScriptedService()
    service.current = replace(STATE, load_balance_method=PREFIX_AFFINITY)
    page = page_of(service)
    for reason in ("explicit_rank", "hit", "load", "cold"):
        name = reason if reason == "explicit_rank" else f"prefix_affinity_{reason}"
        assert f'mlx_dp:grants_total{{routing_reason="{name}"}} 0.0' in page
