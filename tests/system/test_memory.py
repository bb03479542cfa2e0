"""Caches, preemptions and prefix-aware routing, through real processes with the fake engine."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.hosts.served import Served

pytestmark = pytest.mark.system

FAKE = ("--engine", "fake", "--dp-size", "2", "--fake-context-length", "900")
SMALL = ("--fake-pool-tokens", "900", "--fake-decode-rate", "400")
"""Enough for one whole response, and for the beginnings of three, so slow that they overlap."""


def completions(served: Served) -> list[str]:
    def complete(number: int) -> str:
        prompt = [(7 * number + position) % 500 for position in range(30 + number)]
        body = {"prompt": prompt, "max_tokens": 450, "seed": number, "ignore_eos": True}
        status, answer = served.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 450
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(6) as clients:
        return list(clients.map(complete, range(6)))


def metric(served: Served, name: str) -> float:
    _, page = served.get("/metrics")
    lines = [line for line in str(page).splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_answers_that_outgrow_their_owners_are_the_same_as_with_room_for_all() -> None:
    with Served(*FAKE) as roomy, Served(*FAKE, *SMALL) as small:
        roomy.wait_until_ready()
        small.wait_until_ready()
        assert completions(small) == completions(roomy)
        assert metric(roomy, "mlx_dp:owner_preemptions_total") == 0
        assert metric(small, "mlx_dp:owner_preemptions_total") > 0
        assert metric(small, "vllm:num_preemptions_total") > 0
        assert metric(small, "mlx_dp:worker_deaths_total") == 0


def ask(served: Served, prompt: list[int], **fields: Any) -> tuple[int, str]:
    """Return the cached tokens of one request, and the reason of its routing."""
    before = {reason: metric_of_reason(served, reason) for reason in REASONS}
    body = {"prompt": prompt, "max_tokens": 3, "seed": 0, **fields}
    status, answer = served.post("/v1/completions", body)
    assert status == 200, answer
    (reason,) = [each for each in REASONS if metric_of_reason(served, each) != before[each]]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], reason


REASONS = ("prefix_affinity_cold", "prefix_affinity_hit", "prefix_affinity_load")


def metric_of_reason(served: Served, reason: str) -> float:
    _, page = served.get("/metrics")
    found = [line for line in str(page).splitlines() if f'routing_reason="{reason}"' in line]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_a_prompt_goes_to_where_it_is_cached_until_the_caches_are_flushed() -> None:
    with Served(*FAKE, "--load-balance-method", "prefix_affinity") as served:
        served.wait_until_ready()
        prompt = [position % 500 for position in range(400)]
        assert ask(served, prompt) == (0, "prefix_affinity_cold")
        assert ask(served, [*prompt, 7]) == (400, "prefix_affinity_hit")
        assert ask(served, [*prompt, 7], cache_salt="tenant") == (0, "prefix_affinity_cold")
        status, flushed = served.post("/flush_cache", {})
        assert status == 200
        assert flushed["success"]
        assert [owner["outcome"] for owner in flushed["owners"]] == ["flushed", "flushed"]
        assert flushed["num_tokens"] > 800
        assert ask(served, prompt) == (0, "prefix_affinity_cold")
