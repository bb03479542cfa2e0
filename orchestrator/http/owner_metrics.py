"""The metrics of each owner, under this project's names.

The labels are bounded, since the number of owners is fixed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_dp.orchestrator.service import OwnerState, WorkerStatus
from mlx_dp.proto.pass_totals import PassTotals

_OWNER_GAUGES: Final[Sequence[tuple[str, str, Callable[[OwnerState], float]]]] = (
    ("ready", "1 when it takes requests", lambda owner: owner.status is WorkerStatus.READY),
    ("running_requests", "Requests granted to it", lambda owner: owner.running),
    ("used_tokens", "KV tokens that hold content", lambda owner: owner.used_tokens),
    ("reserved_tokens", "KV tokens set aside", lambda owner: owner.reserved_tokens),
    ("restarts", "Starts after the first", lambda owner: owner.restarts),
    ("rss_bytes", "Resident memory of its process", lambda owner: owner.rss_nbytes),
    ("device_bytes", "Memory on its device", lambda owner: owner.device_nbytes),
    (
        "weights_bytes",
        "Weights that its process holds",
        lambda owner: owner.shape.weights_nbytes if owner.shape else 0,
    ),
    ("prefix_cache_tokens", "Tokens of cached prefixes", lambda owner: owner.prefix_tokens),
    ("prefix_cache_bytes", "Memory of cached prefixes", lambda owner: owner.prefix_nbytes),
    ("held_bytes", "Memory of rows, prefixes and states", lambda owner: owner.held_nbytes),
    ("budget_bytes", "What those may take; 0: unbounded", lambda owner: owner.budget_nbytes or 0),
    ("buffers", "Buffers that those and the weights are made of", lambda owner: owner.held_buffers),
)
_OWNER_COUNTERS: Final[Sequence[tuple[str, str, Callable[[OwnerState], float]]]] = (
    ("prompt_tokens", "Prompt tokens it was given", lambda owner: owner.prompt_tokens_total),
    ("cached_tokens", "Those found in its cache", lambda owner: owner.cached_tokens_total),
    ("generation_tokens", "Generated tokens", lambda owner: owner.generated_tokens_total),
    ("preemptions", "Requests it gave up", lambda owner: owner.preemptions_total),
)
# For ranks of a group. They restart at 0 with each process.
_PASS_COUNTERS: Final[Sequence[tuple[str, str, Callable[[PassTotals], float]]]] = (
    ("passes", "Forward passes of its group", lambda totals: totals.passes),
    ("idle_passes", "Those that had no rows of its own", lambda totals: totals.idle_passes),
    ("peer_wait_seconds", "Time it was ready and a peer was not", lambda totals: totals.waited_s),
)


def owner_metrics(owners: Iterable[OwnerState]) -> Iterator[Metric]:
    """Yield the families of all owners."""
    owners = list(owners)
    ranks = [(str(owner.owner), owner.passes) for owner in owners if owner.passes is not None]
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
            batching.add_metric([str(owner.owner), owner.batching.value], 1)
    yield batching
    for family_of, table in (
        (GaugeMetricFamily, _OWNER_GAUGES),
        (CounterMetricFamily, _OWNER_COUNTERS),
    ):
        for name, text, value in table:
            family = family_of(f"mlx_dp:owner_{name}", text, labels=["dp_rank"])
            for owner in owners:
                family.add_metric([str(owner.owner)], value(owner))
            yield family
    yield from _buffer_limits(owners)


def _buffer_limits(owners: Iterable[OwnerState]) -> Iterator[Metric]:
    limits = [(str(o.owner), o.buffer_limit) for o in owners if o.buffer_limit is not None]
    if not limits:
        return
    text = "What its buffers may come to, on devices that count them"
    family = GaugeMetricFamily("mlx_dp:owner_buffer_limit", text, labels=["dp_rank"])
    for rank, limit in limits:
        family.add_metric([rank], limit)
    yield family
