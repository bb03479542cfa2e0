"""GET /metrics: rendered from values at hand, under the names that routers read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mlx_dp.orchestrator.http.counters import Timings
from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.service import OwnerState, WorkerStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# There are no blocks, but routers that hash prompts want a size: prefixes are kept at multiples
# of this.
BLOCK_TOKENS: Final = 64


class Metrics:
    """The page of one endpoint, with a registry of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EndpointCollector(endpoint))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _EndpointCollector(Collector):
    """Every family has one name, so each gets its own TYPE line, as a router insists."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._labels = {"model_name": endpoint.model}

    def collect(self) -> Iterator[Metric]:
        state = self._endpoint.service.state()
        ready = [owner for owner in state.owners if owner.status is WorkerStatus.READY]
        yield from self._gauges(ready, queued=state.queued_requests)
        yield from self._cache_config(ready)
        yield from self._counters()
        yield from self._histograms()
        yield from _owner_metrics(state.owners)

    def _gauges(self, ready: Iterable[OwnerState], *, queued: int) -> Iterator[Metric]:
        ready = list(ready)
        running = sum(owner.running for owner in ready)
        used = sum(owner.used_tokens for owner in ready)
        pool = sum(owner.capacity.pool_tokens or 0 for owner in ready if owner.capacity)
        usage = used / pool if pool else 0.0
        counters = self._endpoint.counters
        prompt = sum(counters.prompt_tokens.values())
        cached = sum(counters.cached_tokens.values())
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

    def _counters(self) -> Iterator[Metric]:
        counters = self._endpoint.counters
        prompt = sum(counters.prompt_tokens.values())
        cached = sum(counters.cached_tokens.values())
        for names, text, value in (
            (("vllm:prompt_tokens", "sglang:prompt_tokens"), "Prompt tokens", prompt),
            (
                ("vllm:generation_tokens", "sglang:generation_tokens"),
                "Generated tokens",
                counters.generation_tokens,
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
            # Nothing is preempted yet; routers want the name.
            (("vllm:num_preemptions",), "Preempted requests", 0),
        ):
            for name in names:
                family = CounterMetricFamily(name, text, labels=list(self._labels))
                family.add_metric(list(self._labels.values()), value)
                yield family
        outcomes = CounterMetricFamily(
            "mlx_dp:answers", "Ended answers by outcome", labels=["outcome"]
        )
        for outcome, count in counters.requests.items():
            outcomes.add_metric([outcome], count)
        yield outcomes

    def _histograms(self) -> Iterator[Metric]:
        counters = self._endpoint.counters
        for name, text, timings in (
            ("time_to_first_token_seconds", "Arrival to first token", counters.first_token),
            ("inter_token_latency_seconds", "Between tokens", counters.inter_token),
            ("time_per_output_token_seconds", "Mean of an answer", counters.per_output_token),
            ("e2e_request_latency_seconds", "Arrival to end", counters.end_to_end),
            ("request_queue_time_seconds", "Arrival to grant", counters.queued),
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


# Ours, per owner: bounded labels, since the number of owners is fixed.
_OWNER_GAUGES: Final[Sequence[tuple[str, str, Callable[[OwnerState], float]]]] = (
    ("ready", "1 when it takes requests", lambda owner: owner.status is WorkerStatus.READY),
    ("running_requests", "Requests granted to it", lambda owner: owner.running),
    ("used_tokens", "KV tokens that hold content", lambda owner: owner.used_tokens),
    ("reserved_tokens", "KV tokens set aside", lambda owner: owner.reserved_tokens),
    ("restarts", "Starts after the first", lambda owner: owner.restarts),
    ("rss_bytes", "Resident memory of its process", lambda owner: owner.rss_nbytes),
    ("device_bytes", "Memory on its device", lambda owner: owner.device_nbytes),
)


def _owner_metrics(owners: Iterable[OwnerState]) -> Iterator[Metric]:
    owners = list(owners)
    for name, text, value in _OWNER_GAUGES:
        family = GaugeMetricFamily(f"mlx_dp:owner_{name}", text, labels=["dp_rank"])
        for owner in owners:
            family.add_metric([str(owner.owner)], value(owner))
        yield family
