"""GET /metrics: rendered from values at hand, under the names that routers read.

What is counted is counted by the controller alone, but for the statuses of HTTP answers. Every
label has few values: owners, statuses, and the controller's own words for outcomes, reasons and
error codes. Those words are there from the start, with 0: a rate needs the value before the first
event, and sglang-router's ``/engine_metrics`` refuses pages of which one has a family's labels and
another has the family without a sample.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mlx_dp.orchestrator.control.counters import (
    ERROR_CODES,
    REFUSAL_REASONS,
    ControllerCounters,
)
from mlx_dp.orchestrator.control.router import routing_reasons
from mlx_dp.orchestrator.control.supervisor_steps import LossKind
from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.http.histograms import RequestHistograms, Timings
from mlx_dp.orchestrator.http.owner_metrics import owner_metrics
from mlx_dp.orchestrator.service import OwnerState, WorkerStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# There are no blocks, but routers that hash prompts want a size: prefixes are kept at multiples
# of this.
BLOCK_TOKENS: Final = 64
# Others are added when they occur.
USUAL_STATUSES: Final = ("200", "400", "429", "500", "503")


class Metrics:
    """The page of one endpoint, with a registry of its own."""

    def __init__(self, endpoint: Endpoint, histograms: RequestHistograms) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EndpointCollector(endpoint, histograms))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _EndpointCollector(Collector):
    """Every family has one name, so each gets its own TYPE line, as a router insists."""

    def __init__(self, endpoint: Endpoint, histograms: RequestHistograms) -> None:
        self._endpoint = endpoint
        self._times = histograms
        self._labels = {"model_name": endpoint.model}

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._families() if family.samples)

    def _families(self) -> Iterator[Metric]:
        state = self._endpoint.service.state()
        counters = self._endpoint.service.counters()
        ready = [owner for owner in state.owners if owner.status is WorkerStatus.READY]
        yield from self._gauges(ready, counters, queued=state.queued_requests)
        yield from self._cache_config(ready)
        yield from self._counters(counters)
        yield from self._histograms()
        yield from _control_metrics(counters)
        yield from _words(counters, routing_reasons(state.load_balance_method))
        yield _by_word(
            "http_responses",
            "Answers to POSTs",
            "status",
            {str(status): count for status, count in self._endpoint.posts.items()},
            known=USUAL_STATUSES,
        )
        yield CounterMetricFamily(
            "mlx_dp:log_lines_dropped",
            "Lines of the log that standard error did not take in time",
            value=self._endpoint.dropped_lines(),
        )
        yield from owner_metrics(state.owners)

    def _gauges(
        self, ready: Sequence[OwnerState], counters: ControllerCounters, *, queued: int
    ) -> Iterator[Metric]:
        running = sum(owner.running for owner in ready)
        used = sum(owner.used_tokens for owner in ready)
        pool = sum(owner.capacity.pool_tokens or 0 for owner in ready if owner.capacity)
        usage = used / pool if pool else 0.0
        prompt, cached = counters.prompt_tokens, counters.cached_tokens
        throughput = sum(owner.generation_tokens_per_s for owner in ready)
        for names, text, value in (
            (("vllm:num_requests_running", "sglang:num_running_reqs"), "Running requests", running),
            (("vllm:num_requests_waiting", "sglang:num_queue_reqs"), "Queued requests", queued),
            (
                (
                    "vllm:kv_cache_usage_perc",
                    "vllm:gpu_cache_usage_perc",
                    "sglang:token_usage",
                ),
                "Used part of the KV tokens, 0 to 1",
                usage,
            ),
            (("sglang:num_used_tokens",), "Used KV tokens", used),
            (("sglang:max_total_num_tokens",), "KV tokens of all ready owners", pool),
            (
                ("sglang:kv_evictable_tokens",),
                "Tokens of cached prefixes, most of which can be dropped",
                sum(owner.prefix_tokens for owner in ready),
            ),
            (("sglang:gen_throughput",), "Generated tokens per second", throughput),
            (
                ("sglang:cache_hit_rate",),
                "Part of the prompt tokens found in a prefix cache",
                cached / prompt if prompt else 0.0,
            ),
        ):
            for name in names:
                yield _gauge(name, text, self._labels, value)

    def _cache_config(self, ready: Iterable[OwnerState]) -> Iterator[Metric]:
        pool = sum(owner.capacity.pool_tokens or 0 for owner in ready if owner.capacity)
        blocks = str(pool // BLOCK_TOKENS)
        text = "KV capacity of all ready owners"
        for name, size, count in (
            ("vllm:cache_config_info", "block_size", "num_gpu_blocks"),
            ("sglang:cache_config_info", "page_size", "num_pages"),
        ):
            labels = {**self._labels, size: str(BLOCK_TOKENS), count: blocks}
            yield _gauge(name, text, labels, 1)

    def _counters(self, counters: ControllerCounters) -> Iterator[Metric]:
        prompt, cached = counters.prompt_tokens, counters.cached_tokens
        for names, text, value in (
            (("vllm:prompt_tokens", "sglang:prompt_tokens"), "Prompt tokens", prompt),
            (
                ("vllm:generation_tokens", "sglang:generation_tokens"),
                "Generated tokens",
                counters.generated_tokens,
            ),
            (
                ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
                "Prompt tokens looked up in a prefix cache",
                prompt,
            ),
            (
                ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens"),
                "Prompt tokens found in a prefix cache",
                cached,
            ),
            (
                ("vllm:num_preemptions", "sglang:num_retracted_requests"),
                "Times that a request was given up for want of memory, to go on later",
                counters.requests_preempted,
            ),
            (("sglang:num_requests",), "Ended requests", _ended(counters)),
        ):
            for name in names:
                family = CounterMetricFamily(name, text, labels=list(self._labels))
                family.add_metric(list(self._labels.values()), value)
                yield family

    def _histograms(self) -> Iterator[Metric]:
        times = self._times
        for name, text, timings in (
            ("time_to_first_token_seconds", "Arrival to first token", times.to_first_token),
            ("inter_token_latency_seconds", "Between tokens", times.inter_token),
            ("time_per_output_token_seconds", "Mean of an answer", times.per_output_token),
            ("e2e_request_latency_seconds", "Arrival to end", times.end_to_end),
            ("request_queue_time_seconds", "Arrival to grant", times.queued),
        ):
            for family in ("vllm", "sglang"):
                yield self._histogram(f"{family}:{name}", text, timings)

    def _histogram(self, name: str, text: str, timings: Timings) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), timings.cumulative(), timings.total_s)
        return family


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _ended(counters: ControllerCounters) -> int:
    return counters.requests_ok + counters.requests_error + counters.requests_aborted


def _control_metrics(counters: ControllerCounters) -> Iterator[Metric]:
    """What only the controller knows, under names of ours."""
    for name, text, value in (
        ("requests_started", "Requests let in", counters.requests_started),
        ("requests_replayed", "Requests whose owner was lost", counters.requests_replayed),
        ("grants_withdrawn", "Grants not accepted in time", counters.grants_withdrawn),
        ("worker_deaths", "Workers lost, for whatever reason", counters.worker_deaths),
        ("worker_restarts", "Workers started again", counters.worker_restarts),
        ("protocol_errors", "Messages for which a worker was given up", counters.protocol_errors),
        ("malformed_frames", "Frames that were no message", counters.malformed_frames),
        ("unknown_frames", "Frames of peers that are not expected", counters.unknown_frames),
        ("stale_facts", "Messages about requests that had moved on", counters.stale_facts),
        ("duplicate_chunks", "Tokens that had arrived before", counters.duplicate_chunks),
    ):
        yield CounterMetricFamily(f"mlx_dp:{name}", text, value=value)


def _words(counters: ControllerCounters, reasons: Sequence[str]) -> Iterator[Metric]:
    """What is counted by one of the controller's words."""
    outcomes = {
        "ok": counters.requests_ok,
        "error": counters.requests_error,
        "aborted": counters.requests_aborted,
    }
    errors, refused = counters.errors, counters.requests_refused
    for name, text, label, values, known in (
        ("requests", "Ended requests", "outcome", outcomes, ()),
        ("request_errors", "Requests that ended with an error", "code", errors, ERROR_CODES),
        ("requests_refused", "Requests not let in", "reason", refused, REFUSAL_REASONS),
        ("grants", "Requests given to an owner", "routing_reason", counters.grants, reasons),
        ("worker_losses", "Workers given up, by how", "cause", counters.worker_losses, LossKind),
    ):
        yield _by_word(name, text, label, values, known=known)


def _by_word(
    name: str, text: str, label: str, values: Mapping[str, int], *, known: Iterable[str]
) -> Metric:
    """A counter by word, those that are ``known`` among them."""
    family = CounterMetricFamily(f"mlx_dp:{name}", text, labels=[label])
    for word, count in {**dict.fromkeys(map(str, known), 0), **values}.items():
        family.add_metric([word], count)
    return family
