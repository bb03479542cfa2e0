"""GET /metrics: rendered from known state, under the names that routers read.

The controller counts everything except the statuses of HTTP responses. Every label has few values:
owners, statuses, and fixed sets of outcomes, reasons and error codes. Those sets are present from
the start, with 0: a rate needs the value before the first event, and sglang-router's
``/engine_metrics`` refuses pages when one has a family's labels and another has the family without
a sample.
"""

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

from mlx_dp.orchestrator.api import OwnerState, WorkerStatus
from mlx_dp.orchestrator.control.routing.policies import routing_reasons
from mlx_dp.orchestrator.http.routes.context import AppContext
from mlx_dp.orchestrator.http.routes.histograms import RequestHistograms, Timings
from mlx_dp.orchestrator.service_counters import ERROR_CODES, REFUSAL_REASONS, ControllerCounters
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.events import PassTotals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# There are no blocks, but routers that hash prompts need a size: prefixes are kept at multiples
# of this one.
BLOCK_TOKENS: Final = 64
# Others are added when they occur.
USUAL_STATUSES: Final = ("200", "400", "429", "500", "503")
_OWNER_GAUGES: Final[Sequence[tuple[str, str, Callable[[OwnerState], float]]]] = (
    ("ready", "1 if the owner is ready", lambda owner: owner.status is WorkerStatus.READY),
    ("running_requests", "Requests granted to the owner", lambda owner: owner.running),
    ("used_tokens", "KV tokens that hold content", lambda owner: owner.used_tokens),
    ("reserved_tokens", "KV tokens set aside", lambda owner: owner.reserved_tokens),
    ("restarts", "Starts after the first", lambda owner: owner.restarts),
    ("rss_bytes", "Resident memory of the owner's process", lambda owner: owner.rss_nbytes),
    ("device_bytes", "Memory on the owner's device", lambda owner: owner.device_nbytes),
    (
        "weights_bytes",
        "Weights that the owner's process holds",
        lambda owner: owner.shape.weights_nbytes if owner.shape else 0,
    ),
    ("prefix_cache_tokens", "Tokens of cached prefixes", lambda owner: owner.prefix_tokens),
    ("prefix_cache_bytes", "Memory of cached prefixes", lambda owner: owner.prefix_nbytes),
    ("held_bytes", "Memory of rows, prefixes and states", lambda owner: owner.held_nbytes),
    ("budget_bytes", "Limit of held_bytes; 0: unbounded", lambda owner: owner.budget_nbytes or 0),
    (
        "buffers",
        "Device buffers of rows, prefixes, states and weights",
        lambda owner: owner.held_buffers,
    ),
)
_OWNER_COUNTERS: Final[Sequence[tuple[str, str, Callable[[OwnerState], float]]]] = (
    (
        "prompt_tokens",
        "Prompt tokens of the owner's requests",
        lambda owner: owner.prompt_tokens_total,
    ),
    (
        "cached_tokens",
        "Prompt tokens found in the owner's prefix cache",
        lambda owner: owner.cached_tokens_total,
    ),
    ("generation_tokens", "Generated tokens", lambda owner: owner.generated_tokens_total),
    ("preemptions", "Requests that the owner preempted", lambda owner: owner.preemptions_total),
)
# For ranks of a group. They restart at 0 with each process.
_PASS_COUNTERS: Final[Sequence[tuple[str, str, Callable[[PassTotals], float]]]] = (
    ("passes", "Forward passes of the owner's group", lambda totals: totals.passes),
    ("idle_passes", "Forward passes without rows of this owner", lambda totals: totals.idle_passes),
    ("peer_wait_seconds", "Time that the owner waited for a peer", lambda totals: totals.waited_s),
)


class Metrics:
    """The metrics page of one application, with its own registry."""

    def __init__(self, context: AppContext, histograms: RequestHistograms) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(context, histograms))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _Collector(Collector):
    """Every family has one name, since routers require a TYPE line for each name."""

    def __init__(self, context: AppContext, histograms: RequestHistograms) -> None:
        self._context = context
        self._times = histograms
        self._labels = {"model_name": context.model}

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._families() if family.samples)

    def _families(self) -> Iterator[Metric]:
        state = self._context.service.state()
        counters = self._context.service.counters()
        ready = [owner for owner in state.owners if owner.status is WorkerStatus.READY]
        yield from self._gauges(ready, counters, queued=state.queued_requests)
        yield from self._cache_config(ready)
        yield from self._counters(counters)
        yield from self._histograms()
        yield from _control_metrics(counters)
        yield from _labelled(counters, routing_reasons(state.load_balance_method))
        yield _by_label(
            "http_responses",
            "Responses to POSTs",
            "status",
            {str(status): count for status, count in self._context.post_statuses.items()},
            known=USUAL_STATUSES,
        )
        yield CounterMetricFamily(
            "mlx_dp:log_lines_dropped",
            "Log lines dropped because standard error was blocked",
            value=self._context.dropped_lines(),
        )
        yield from _owner_metrics(state.owners)

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
                "Preemptions of requests for lack of memory",
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
            (
                "time_per_output_token_seconds",
                "Mean time per output token of a request",
                times.per_output_token,
            ),
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
    """The controller's own counters, under this project's names."""
    for name, text, value in (
        ("requests_started", "Requests admitted", counters.requests_started),
        (
            "requests_replayed",
            "Requests replayed after their owner was lost",
            counters.requests_replayed,
        ),
        ("grants_withdrawn", "Grants not accepted in time", counters.grants_withdrawn),
        ("worker_deaths", "Workers lost, except by requested restarts", counters.worker_deaths),
        ("worker_restarts", "Restarts of workers", counters.worker_restarts),
        (
            "protocol_errors",
            "Protocol violations for which a worker was replaced",
            counters.protocol_errors,
        ),
        ("malformed_frames", "Frames that are not a valid message", counters.malformed_frames),
        ("unknown_frames", "Frames from unexpected peers", counters.unknown_frames),
        ("stale_events", "Events about requests that had ended or moved", counters.stale_events),
        ("duplicate_chunks", "Repeated chunks of tokens", counters.duplicate_chunks),
    ):
        yield CounterMetricFamily(f"mlx_dp:{name}", text, value=value)


def _labelled(counters: ControllerCounters, reasons: Sequence[str]) -> Iterator[Metric]:
    """Counters with a label from one of the fixed sets."""
    outcomes = {
        "ok": counters.requests_ok,
        "error": counters.requests_error,
        "aborted": counters.requests_aborted,
    }
    errors, refused = counters.errors, counters.requests_refused
    for name, text, label, values, known in (
        ("requests", "Ended requests", "outcome", outcomes, ()),
        ("request_errors", "Requests that ended with an error", "code", errors, ERROR_CODES),
        ("requests_refused", "Requests refused", "reason", refused, REFUSAL_REASONS),
        ("grants", "Grants of requests to owners", "routing_reason", counters.grants, reasons),
        (
            "worker_losses",
            "Workers lost, by kind of loss",
            "cause",
            counters.worker_losses,
            LossKind,
        ),
    ):
        yield _by_label(name, text, label, values, known=known)


def _by_label(
    name: str, text: str, label: str, values: Mapping[str, int], *, known: Iterable[str]
) -> Metric:
    """A counter by label value, including all ``known`` values."""
    family = CounterMetricFamily(f"mlx_dp:{name}", text, labels=[label])
    for word, count in {**dict.fromkeys(map(str, known), 0), **values}.items():
        family.add_metric([word], count)
    return family


def _owner_metrics(owners: Iterable[OwnerState]) -> Iterator[Metric]:
    """Yield the families of all owners, under this project's names.

    The labels are bounded, since the number of owners is fixed.
    """
    owners = list(owners)
    ranks = [(str(owner.dp_rank), owner.passes) for owner in owners if owner.passes is not None]
    for name, text, total in _PASS_COUNTERS if ranks else ():
        counter = CounterMetricFamily(f"mlx_dp:owner_{name}", text, labels=["dp_rank"])
        for rank, totals in ranks:
            counter.add_metric([rank], total(totals))
        yield counter
    batching = GaugeMetricFamily(
        "mlx_dp:owner_batching", "1 for the form of its batch", labels=["dp_rank", "form"]
    )
    for owner in owners:
        if owner.batching is not None:
            batching.add_metric([str(owner.dp_rank), owner.batching.value], 1)
    yield batching
    for family_of, table in (
        (GaugeMetricFamily, _OWNER_GAUGES),
        (CounterMetricFamily, _OWNER_COUNTERS),
    ):
        for name, text, value in table:
            family = family_of(f"mlx_dp:owner_{name}", text, labels=["dp_rank"])
            for owner in owners:
                family.add_metric([str(owner.dp_rank)], value(owner))
            yield family
    yield from _buffer_limits(owners)


def _buffer_limits(owners: Iterable[OwnerState]) -> Iterator[Metric]:
    limits = [(str(o.dp_rank), o.buffer_limit) for o in owners if o.buffer_limit is not None]
    if not limits:
        return
    text = "Limit of buffers, on devices that have one"
    family = GaugeMetricFamily("mlx_dp:owner_buffer_limit", text, labels=["dp_rank"])
    for rank, limit in limits:
        family.add_metric([rank], limit)
    yield family
