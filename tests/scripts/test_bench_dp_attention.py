"""Conclusions that the benchmark of DP attention draws from its observations."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("mlx.core")

import mlx.core as mx

pytestmark = pytest.mark.mlx


def test_nine_tenths_of_the_mixture_are_in_its_experts(load: Any) -> None:
    config = load("benchmarks.dp_attention.moe").MOE
    layers, width, head = (
        config[name] for name in ("num_hidden_layers", "hidden_size", "head_dim")
    )
    experts = layers * config["num_experts"] * 3 * width * config["moe_intermediate_size"]
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    rest = config["vocab_size"] * width + layers * width * (heads * head + config["num_experts"])
    assert experts / (experts + rest) == pytest.approx(0.9, abs=0.01)
    assert 4 * (experts + rest) == pytest.approx(300e6, rel=0.05)


def test_a_cut_tokenizer_encodes_the_same_with_its_remaining_tokens(load: Any) -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    whole = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    cut = load("benchmarks.dp_attention.moe").shorten(json.loads(whole.to_str()), 4)
    assert whole.encode("abc ab").ids == [4, 3]
    assert Tokenizer.from_str(json.dumps(cut)).encode("abc ab").ids == [3, 2, 3]


def test_a_rank_that_comes_last_to_a_collective_shows_what_exchange_takes(load: Any) -> None:
    first, second = load("benchmarks.dp_attention.split").split(
        1.0, 2, [0.2, 0.0], [[0.5, 0.1], [0.1, 0.3]]
    )
    assert first.exchange_s == second.exchange_s == pytest.approx(0.1)
    assert first.wait_s == pytest.approx(0.1 + 0.3 - 0.1)
    assert second.wait_s == pytest.approx(0.2 - 0.1)
    for part in (first, second):
        assert part.compute_s + part.exchange_s + part.wait_s == pytest.approx(1.0)


def test_late_tokens_of_a_dead_worker_are_not_taken_for_its_recovery(load: Any) -> None:
    stream = load("benchmarks.serving.client").Stream(chunks_s=[0.0, 0.1, 0.21, 3.0, 3.1, 3.2])
    assert load("benchmarks.dp_attention.kill").longest_gap(stream, 0.2) == (0.21, 3.0)


def test_the_counters_of_each_rank_are_read_from_the_metrics(load: Any) -> None:
    page = b"""
mlx_dp:owner_passes_total{dp_rank="1"} 12.0
mlx_dp:owner_peer_wait_seconds_total{dp_rank="0"} 0.5
mlx_dp:owner_generation_tokens_created{dp_rank="0"} 9.0
"""

    async def get(path: str) -> bytes:
        assert path == "/metrics"
        return page

    server = SimpleNamespace(client=SimpleNamespace(get=get))
    counts = asyncio.run(load("benchmarks.dp_attention.modes").owner_counts(server))
    assert counts == {("passes", 1): 12.0, ("peer_wait_seconds", 0): 0.5}


def test_a_collective_is_timed_only_while_it_is_traced(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("all_sum", "all_gather"):
        monkeypatch.setattr(mx.distributed, name, lambda rows, group: rows + group)
    clock = load("benchmarks.dp_attention.collectives").CollectiveClock()
    clock.install()
    assert mx.distributed.all_sum(mx.array([1]), group=2).tolist() == [3]
    assert clock.end() == []
    clock.begin(trace=True)
    assert mx.distributed.all_gather(mx.array([1]), group=3).tolist() == [4]
    assert len(clock.end()) == 1
    mx.distributed.all_sum(mx.array([1]), group=2)
    assert len(clock.end()) == 1


def test_more_than_the_goal_of_weights_is_called_missed(load: Any) -> None:
    tables = load("benchmarks.dp_attention.tables")
    for held, verdict in ((60, "met"), (61, "MISSED")):
        nbytes = {"one process": [100], "2 replicas": [100, 100], "2 ranks": [60, held]}
        page = tables.weights_table(nbytes, nbytes, tables.MOE_WEIGHTS)
        assert page.count(verdict) == 1, page


def test_the_response_head_names_the_owner(load: Any) -> None:
    async def owner_of(head: bytes) -> int | None:
        reader = asyncio.StreamReader()
        reader.feed_data(head)
        return (await load("benchmarks.serving.client")._head(reader)).owner

    assert asyncio.run(owner_of(b"HTTP/1.1 200 OK\r\nX-DP-Rank: 1\r\n\r\n")) == 1
    assert asyncio.run(owner_of(b"HTTP/1.1 200 OK\r\n\r\n")) is None
