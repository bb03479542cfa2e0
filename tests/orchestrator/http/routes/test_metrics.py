"""GET /metrics: the controller's counters under routers' names, and no other counters."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass, fields, replace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from mlx_dp.orchestrator.api import Service, WorkerStatus
from mlx_dp.orchestrator.control.controller import Controller
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.http.routes.histograms import RequestHistograms
from mlx_dp.orchestrator.http.routes.metrics import USUAL_STATUSES
from mlx_dp.orchestrator.service_counters import (
    ERROR_CODES,
    REFUSAL_REASONS,
    ControllerCounters,
    RequestTimings,
)
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.events import FinishReason, PassTotals
from tests.support.control.control_world import World, serve_options
from tests.support.control.fake_worker import SHAPE, ready
from tests.support.control.owner_states import READY
from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call
from tests.support.http.metrics_page import assert_joinable
from tests.support.http.scripted_service import OPTIONS, ScriptedService

ROUTERS_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:cache_config_info",
)


def samples(page: str) -> dict[str, float]:
    """Values by name, with the labels of ours in braces."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "le")}
            found[sample.name + "".join(f"{{{value}}}" for value in labels.values())] = sample.value
    return found


def page_of(service: Service) -> str:
    response = call(service, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text


def test_lines_of_the_log_that_were_dropped_are_counted() -> None:
    app = create_app(ScriptedService(), OPTIONS, FakeTextModel(512), dropped_lines=lambda: 7)

    async def page() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/metrics")).text

    assert samples(asyncio.run(page()))["mlx_dp:log_lines_dropped_total"] == 7
    assert samples(page_of(ScriptedService()))["mlx_dp:log_lines_dropped_total"] == 0


def test_both_families_are_there_and_each_has_a_type_line() -> None:
    page = page_of(ScriptedService())
    lines = page.splitlines()
    names = {line.split()[0].split("{")[0] for line in lines if not line.startswith("#")}
    assert not set(ROUTERS_NAMES) - names
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    for name in names:
        family = name
        for suffix in ("_bucket", "_count", "_sum"):
            family = family.removesuffix(suffix)
        assert family in typed or name in typed, name


def test_every_count_is_the_controllers() -> None:
    service = ScriptedService()
    counters = service.totals
    counters.requests_started, counters.requests_ok = 101, 102
    counters.requests_error, counters.requests_aborted, counters.requests_replayed = 103, 104, 105
    counters.worker_deaths, counters.worker_restarts = 106, 107
    counters.protocol_errors, counters.malformed_frames = 108, 109
    counters.stale_events, counters.duplicate_chunks = 110, 111
    counters.prompt_by_owner.update({0: 100, 1: 12})
    counters.cached_by_owner.update({0: 13, 1: 15})
    counters.generated_by_owner.update({0: 100, 1: 14})
    counters.preempted_by_owner.update({0: 100, 1: 19})
    counters.requests_refused["queue_full"] = 115
    counters.errors["worker_lost"] = 116
    counters.grants["total_tokens"] = 117
    counters.losses["hung"], counters.grants_withdrawn = 120, 121
    service.counters = lambda: counters.snapshot(unknown_frames=118)
    found = samples(page_of(service))
    expected = {
        "mlx_dp:requests_started_total": 101,
        "mlx_dp:requests_total{ok}": 102,
        "mlx_dp:requests_total{error}": 103,
        "mlx_dp:requests_total{aborted}": 104,
        "sglang:num_requests_total": 309,
        "mlx_dp:requests_replayed_total": 105,
        "vllm:num_preemptions_total": 119,
        "sglang:num_retracted_requests_total": 119,
        "mlx_dp:worker_deaths_total": 106,
        "mlx_dp:worker_restarts_total": 107,
        "mlx_dp:protocol_errors_total": 108,
        "mlx_dp:malformed_frames_total": 109,
        "mlx_dp:stale_events_total": 110,
        "mlx_dp:duplicate_chunks_total": 111,
        "vllm:prompt_tokens_total": 112,
        "sglang:prompt_tokens_total": 112,
        "vllm:prefix_cache_queries_total": 112,
        "vllm:prefix_cache_hits_total": 28,
        "sglang:cached_tokens_total": 28,
        "sglang:cache_hit_rate": 0.25,
        "vllm:generation_tokens_total": 114,
        "sglang:generation_tokens_total": 114,
        "mlx_dp:requests_refused_total{queue_full}": 115,
        "mlx_dp:request_errors_total{worker_lost}": 116,
        "mlx_dp:grants_total{total_tokens}": 117,
        "mlx_dp:unknown_frames_total": 118,
        "mlx_dp:worker_losses_total{hung}": 120,
        "mlx_dp:grants_withdrawn_total": 121,
    }
    assert {name: found.get(name) for name in expected} == expected
    # A count that is added there must get a name here.
    assert len(fields(ControllerCounters)) == 21


def test_each_owner_tells_of_its_cache_and_its_memory() -> None:
    capacity = replace(ready().capacity, cache_nbytes=64000)
    owner = replace(
        READY,
        capacity=capacity,
        prefix_tokens=300,
        prefix_nbytes=19200,
        held_nbytes=35200,
        held_buffers=5838,
        prompt_tokens_total=400,
        cached_tokens_total=100,
        generated_tokens_total=50,
        preemptions_total=3,
    )
    found = samples(page_of(ScriptedService(owners=(owner, replace(owner, dp_rank=1)))))
    expected = {
        "mlx_dp:owner_prefix_cache_tokens{1}": 300,
        "mlx_dp:owner_prefix_cache_bytes{1}": 19200,
        "mlx_dp:owner_held_bytes{1}": 35200,
        "mlx_dp:owner_budget_bytes{1}": 64000,
        "mlx_dp:owner_buffers{1}": 5838,
        "mlx_dp:owner_prompt_tokens_total{1}": 400,
        "mlx_dp:owner_cached_tokens_total{1}": 100,
        "mlx_dp:owner_generation_tokens_total{1}": 50,
        "mlx_dp:owner_preemptions_total{1}": 3,
        "sglang:kv_evictable_tokens": 600,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_each_owner_tells_the_form_of_its_batch() -> None:
    forms = (Batching.SEVERAL_SLABS, Batching.ONE_BY_ONE, None)
    owners = tuple(
        replace(READY, dp_rank=owner, batching=batching) for owner, batching in enumerate(forms)
    )
    page = page_of(ScriptedService(owners=owners))
    assert [line for line in page.splitlines() if line.startswith("mlx_dp:owner_batching{")] == [
        'mlx_dp:owner_batching{dp_rank="0",form="several_slabs"} 1.0',
        'mlx_dp:owner_batching{dp_rank="1",form="one_by_one"} 1.0',
    ]


def test_owners_on_devices_that_count_buffers_tell_how_many_they_may_hold() -> None:
    counting = replace(READY, dp_rank=1, held_buffers=5838, buffer_limit=249_500)
    found = samples(page_of(ScriptedService(owners=(READY, counting))))
    assert found["mlx_dp:owner_buffer_limit{1}"] == 249_500
    assert "mlx_dp:owner_buffer_limit{0}" not in found, "its device counts none"
    assert "mlx_dp:owner_buffer_limit" not in page_of(ScriptedService(owners=(READY,)))


def test_ranks_of_a_group_tell_of_their_passes_and_weights() -> None:
    totals = PassTotals(passes=900, idle_passes=300, waited_s=1.5)
    owners = tuple(
        replace(READY, dp_rank=rank, shape=replace(SHAPE, weights_nbytes=379), passes=passes)
        for rank, passes in enumerate((totals, None))
    )
    found = samples(page_of(ScriptedService(owners=owners)))
    expected = {
        "mlx_dp:owner_weights_bytes{1}": 379,
        "mlx_dp:owner_passes_total{0}": 900,
        "mlx_dp:owner_idle_passes_total{0}": 300,
        "mlx_dp:owner_peer_wait_seconds_total{0}": 1.5,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "mlx_dp:owner_passes_total{1}" not in found, "it has not said anything yet"


def test_histograms_tell_what_the_observer_heard() -> None:
    histograms = RequestHistograms()
    histograms.started(0.5)
    histograms.first_token(1.5)
    histograms.next_tokens(0.25)
    timings = RequestTimings(
        reason=FinishReason.STOP,
        code="",
        prompt_tokens=1,
        output_tokens=5,
        cached_tokens=0,
        dp_rank=0,
        granted_s=0.5,
        first_token_s=1.0,
        last_token_s=3.0,
        ended_s=4.0,
    )
    histograms.ended(timings)
    histograms.ended(replace(timings, output_tokens=1))
    totals = [
        (each.total_s, each.cumulative()[-1][1])
        for each in (
            histograms.queued,
            histograms.to_first_token,
            histograms.inter_token,
            histograms.per_output_token,
            histograms.end_to_end,
        )
    ]
    assert totals == [(0.5, 1), (1.5, 1), (0.25, 1), (0.5, 1), (8.0, 2)]


@dataclass
class Stage:
    """The app over a controller whose fake workers run by themselves, unless ``silent``."""

    world: World
    controller: Controller
    app: FastAPI
    client: httpx.AsyncClient
    silent: bool = False

    async def run_workers(self) -> None:
        while True:
            if not self.silent:
                self.world.greet()
                self.world.run_workers()
            await asyncio.sleep(0)


def play(act: Callable[[Stage], Coroutine]) -> None:
    async def run() -> None:
        world = World(limits=ControlLimits(tick_s=0.01, stop_grace_s=0.2))
        # The text side's vocabulary.
        loaded = replace(ready(), shape=replace(SHAPE, vocab_size=512))
        world.readies = {0: loaded, 1: loaded}
        controller = Controller(serve_options(), ControlPorts(world, world), limits=world.limits)
        world.core = controller._core
        app = create_app(controller, OPTIONS, FakeTextModel(512))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        stage = Stage(world, controller, app, client)
        async with asyncio.timeout(20), client:
            await controller.start()
            turning = asyncio.create_task(stage.run_workers())
            try:
                while any(owner.status != "ready" for owner in controller.state().owners):
                    await asyncio.sleep(0)
                await act(stage)
                await controller.stop()
            finally:
                turning.cancel()

    asyncio.run(run())


def test_the_page_agrees_with_what_clients_got() -> None:
    async def act(stage: Stage) -> None:
        usages = Counter()
        for body in ({"max_tokens": 5}, {"max_tokens": 3, "n": 2}):
            answer = await stage.client.post(COMPLETIONS, json={"prompt": [1, 2, 3], **body})
            assert answer.status_code == 200, answer.text
            usages.update(answer.json()["usage"] | {"prompt_tokens_details": 0})
        refused = await stage.client.post(COMPLETIONS, json={"prompt": [1] * 1200})
        assert refused.status_code == 400
        found = samples((await stage.client.get("/metrics")).text)
        assert found["vllm:generation_tokens_total"] == usages["completion_tokens"] == 11
        # Each of two choices has the prompt for itself.
        assert found["vllm:prompt_tokens_total"] == usages["prompt_tokens"] + 3 == 9
        assert found["mlx_dp:requests_total{ok}"] == 3
        assert found["mlx_dp:grants_total{total_tokens}"] == 3
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert found[f"vllm:{name}_seconds_count"] == 3
        assert found["vllm:inter_token_latency_seconds_count"] == 11 - 3
        assert found["vllm:time_per_output_token_seconds_count"] == 3

    play(act)


def test_an_answer_that_a_stop_string_ends_counts_as_ok() -> None:
    async def act(stage: Stage) -> None:
        whole = await stage.client.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 8})
        text = whole.json()["choices"][0]["text"]
        body = {"prompt": [1, 2], "max_tokens": 200, "stop": text[2:4]}
        stopped = await stage.client.post(COMPLETIONS, json=body)
        assert stopped.json()["choices"][0]["finish_reason"] == "stop"
        found = samples((await stage.client.get("/metrics")).text)
        assert found["mlx_dp:requests_total{ok}"] == 2
        assert found["mlx_dp:requests_total{aborted}"] == 0

    play(act)


def test_a_stream_names_its_owner_and_why_before_the_owners_first_event() -> None:
    body = b'{"prompt": [1, 2], "stream": true, "max_tokens": 2, "routed_dp_rank": 1}'
    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }

    async def act(stage: Stage) -> None:
        sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            return requests.pop() if requests else await asyncio.Future()

        stage.silent = True
        reply = asyncio.create_task(stage.app(scope, receive, sent.put))
        start = await sent.get()
        stage.silent = False
        await reply
        headers = dict(start["headers"])
        assert (start["status"], headers[b"x-dp-rank"]) == (200, b"1")
        assert headers[b"x-routing-reason"] == b"explicit_rank"

    play(act)


def test_pages_can_be_joined_whatever_has_happened_to_requests_and_workers() -> None:
    pages = {}

    async def act(stage: Stage) -> None:
        async def look(state: str) -> None:
            pages[state] = (await stage.client.get("/metrics")).text

        await look("ready")
        for rank in (0, 1):
            body = {"prompt": [1, 2], "max_tokens": 2, "routed_dp_rank": rank}
            assert (await stage.client.post(COMPLETIONS, json=body)).is_success
            await look(f"rank {rank} has served")
        stage.world.worker(0).kill()
        while stage.controller.state().owners[0].status is WorkerStatus.READY:
            await asyncio.sleep(0)
        await look("one was killed")
        while stage.controller.state().owners[0].status is not WorkerStatus.READY:
            await asyncio.sleep(0)
        await look("it is back")

    play(act)
    assert_joinable(pages)


def test_what_is_refused_before_the_service_hears_of_it_is_counted_by_status() -> None:
    async def act(stage: Stage) -> None:
        for body in ({"prompt": [1], "max_tokens": 1}, {"prompt": [1], "max_tokens": 0}, {}):
            await stage.client.post(COMPLETIONS, json=body)
        await stage.client.get("/nothing")
        found = samples((await stage.client.get("/metrics")).text)
        assert found["mlx_dp:http_responses_total{200}"] == 1
        assert found["mlx_dp:http_responses_total{400}"] == 2
        assert found["mlx_dp:http_responses_total{429}"] == 0
        assert "mlx_dp:http_responses_total{404}" not in found
        assert found["mlx_dp:requests_started_total"] == 1

    play(act)


def test_label_values_come_from_owners_and_the_controllers_own_words_only() -> None:
    service = ScriptedService()
    body = {"messages": HI, "user": "someone", "model": "demo/fake"}
    assert call(service, "POST", CHAT, json=body, headers={"x-request-id": "r1"}).is_success
    labels = {
        (name, value)
        for family in text_string_to_metric_families(page_of(service))
        for sample in family.samples
        for name, value in sample.labels.items()
        if name not in ("le", "block_size", "num_gpu_blocks", "page_size", "num_pages")
    }
    words = {
        "model_name": ["demo/fake"],
        "dp_rank": ["0", "1"],
        "outcome": ["ok", "error", "aborted"],
        "code": ERROR_CODES,
        "reason": REFUSAL_REASONS,
        "routing_reason": ["explicit_rank", "total_tokens"],
        "cause": list(LossKind),
        "status": USUAL_STATUSES,
    }
    assert labels == {(name, word) for name, known in words.items() for word in known}
