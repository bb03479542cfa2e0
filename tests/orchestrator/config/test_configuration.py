"""Refused flags, and the configuration made from accepted ones."""

from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import (
    FakeFlags,
    Flags,
    HttpFlags,
    ModelFlags,
    OwnerFlags,
    QueueFlags,
)
from mlx_dp.orchestrator.control.routing.policies import METHODS
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.group import DistributedBackend
from tests.support.control.flag_values import FAKE_MODEL, flags


def with_value(group: str, name: str, value: Any) -> Flags:
    whole = flags()
    return replace(whole, **{group: replace(getattr(whole, group), **{name: value})})


def test_defaults_are_accepted() -> None:
    configuration.check_flags(flags(model=ModelFlags()))


@pytest.mark.parametrize(
    ("group", "name", "value", "flag"),
    [
        ("owners", "mem_fraction_static", 0.0, "--mem-fraction-static 0"),
        ("owners", "mem_fraction_static", 1.5, "--mem-fraction-static 1.5"),
        ("owners", "mem_fraction_static", float("nan"), "--mem-fraction-static nan"),
        ("owners", "chunked_prefill_size", 0, "--chunked-prefill-size 0"),
        ("owners", "max_running_requests", 0, "--max-running-requests 0"),
        ("owners", "max_running_requests", 2**20 + 1, "--max-running-requests 1048577"),
        ("owners", "max_total_tokens", -1, "--max-total-tokens -1"),
        ("owners", "distributed_backend", DistributedBackend.RING, "--distributed-backend ring"),
        ("owners", "enable_dp_lm_head", True, "--enable-dp-lm-head"),
        ("owners", "max_restarts", -1, "--max-restarts -1"),
        ("owners", "heartbeat_interval", 0.0, "--heartbeat-interval 0"),
        ("owners", "hang_timeout", 3601.0, "--hang-timeout 3601"),
        ("owners", "restart_window", 0.0, "--restart-window 0"),
        ("owners", "start_timeout", -1.0, "--start-timeout -1"),
        ("owners", "restart_delay", float("nan"), "--restart-delay nan"),
        ("model", "context_length", 1, "--context-length 1"),
        ("queue", "max_queued_requests", 0, "--max-queued-requests 0"),
        ("queue", "queue_timeout", 0.0, "--queue-timeout 0"),
        ("queue", "request_timeout", float("inf"), "--request-timeout inf"),
        ("queue", "load_balance_method", "random", "--load-balance-method 'random'"),
        ("http", "port", 65536, "--port 65536"),
        ("http", "drain_timeout", -1.0, "--drain-timeout -1"),
        ("http", "log_level", "loud", "--log-level 'loud'"),
        ("http", "api_key", " ", "--api-key"),
        ("fake", "fake_decode_rate", -1.0, "--fake-decode-rate -1"),
        ("fake", "fake_vocab_size", 1, "--fake-vocab-size 1"),
        ("fake", "fake_pool_tokens", 0, "--fake-pool-tokens 0"),
    ],
)
def test_a_bad_value_is_refused_by_its_flag(group: str, name: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configuration.check_flags(with_value(group, name, value))
    assert str(refused.value).startswith(flag)
    assert ": use " in str(refused.value) or ": give " in str(refused.value)


def test_a_hang_takes_at_least_four_heartbeats() -> None:
    configuration.check_flags(with_value("owners", "hang_timeout", 2.0))
    with pytest.raises(ConfigError, match=r"--hang-timeout 1\.9 .* use at least 2$"):
        configuration.check_flags(with_value("owners", "hang_timeout", 1.9))
    with pytest.raises(ConfigError, match="less than 4 heartbeats of 5 s"):
        configuration.check_flags(with_value("owners", "heartbeat_interval", 5.0))


def test_a_larger_model_may_take_longer_to_start_unless_told_otherwise() -> None:
    small, large = (
        configuration.start_timeout_s(OwnerFlags(), weights_nbytes)
        for weights_nbytes in (0, 10**12)
    )
    assert (small, large) == (600.0, 50_600.0)
    assert configuration.start_timeout_s(OwnerFlags(start_timeout=7.0), 10**12) == 7.0


def test_an_unknown_method_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="round_robin, total_requests, total_tokens"):
        configuration.check_flags(with_value("queue", "load_balance_method", "best"))


def test_every_fake_flag_reaches_the_engine() -> None:
    options = configuration.fake_options(
        FakeFlags(
            fake_decode_rate=1.0,
            fake_prefill_rate=2.0,
            fake_pool_tokens=3,
            fake_vocab_size=4,
            fake_context_length=5,
            fake_hybrid=True,
            fake_seed=6,
            fake_load_time=7.0,
        )
    )
    assert (options.decode_tokens_per_s, options.prefill_tokens_per_s) == (1.0, 2.0)
    assert (options.pool_tokens, options.vocab_size, options.context_length) == (3, 4, 5)
    assert (options.hybrid, options.seed, options.load_s) == (True, 6, 7.0)


def test_the_queue_and_the_endpoint_are_as_given() -> None:
    whole = flags(
        queue=QueueFlags(
            load_balance_method="round_robin",
            max_queued_requests=5,
            queue_timeout=6.0,
            request_timeout=7.0,
        ),
        http=HttpFlags(
            host="::1",
            api_key="secret",
            drain_timeout=8.0,
            allowed_host=["llm.example.com"],
            open_metadata=True,
        ),
    )
    queue = configuration.queue_options(whole)
    assert (queue.load_balance_method, queue.max_queued_requests) == ("round_robin", 5)
    assert (queue.queue_timeout_s, queue.request_timeout_s) == (6.0, 7.0)
    http = configuration.http_options(whole.http, served_model_name="m", port=9, open_files=9999)
    assert (http.host, http.port, http.api_key, http.drain_timeout_s) == ("::1", 9, "secret", 8.0)
    assert (http.allowed_hosts, http.open_metadata) == (("llm.example.com",), True)
    assert "secret" not in repr(http)


def test_there_are_fewer_connections_than_files_that_may_be_open() -> None:
    for flag, open_files, most in ((16_384, 65_536, 16_384), (16_384, 1024, 832), (5, 256, 5)):
        http = configuration.http_options(
            HttpFlags(max_connections=flag), served_model_name="m", port=9, open_files=open_files
        )
        assert http.max_connections == most


@pytest.mark.parametrize("name", ["", "http://x.com", "x.com:80", "x.com/", "a b", "x\n"])
def test_a_host_that_is_no_name_is_refused(name: str) -> None:
    http = HttpFlags(allowed_host=["llm.example.com", name])
    with pytest.raises(ConfigError, match=r"--allowed-host .* is not a host name"):
        configuration.check_flags(flags(http=http))


def test_origins_are_kept_as_browsers_write_them_and_refused_otherwise() -> None:
    given = ["https://Chat.example.com:443", "http://localhost:3000", "https://chat.example.com"]
    http = configuration.http_options(
        HttpFlags(cors_origin=given), served_model_name="m", port=9, open_files=9999
    )
    assert http.cors_origins == ("https://chat.example.com", "http://localhost:3000")
    for origin, advice in (("*", "every page"), ("https://a.example/x", "give https://a.example")):
        with pytest.raises(ConfigError, match=rf"--cors-origin .* is not an origin: .*{advice}"):
            configuration.check_flags(flags(http=HttpFlags(cors_origin=[given[0], origin])))


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 1025])
def test_a_name_that_no_client_can_ask_for_is_refused(name: str) -> None:
    model = replace(FAKE_MODEL, served_model_name=["chat", name])
    with pytest.raises(ConfigError, match=r"--served-model-name .* is not a valid name"):
        configuration.check_flags(flags(model=model))


def test_strictness_goes_to_the_queue() -> None:
    for strict in (False, True):
        whole = flags(http=HttpFlags(strict_max_tokens=strict))
        assert configuration.queue_options(whole).strict_max_tokens is strict


def test_topology_is_refused_before_any_limit() -> None:
    with pytest.raises(ConfigError, match="--tp-size 2 needs --enable-dp-attention"):
        configuration.ownership(OwnerFlags(tp_size=2, max_running_requests=0))


def test_a_time_without_end_is_told_the_most_that_it_may_be() -> None:
    with pytest.raises(ConfigError, match=r"use more than 0 and at most 1000000000$"):
        configuration.check_flags(with_value("queue", "request_timeout", float("inf")))
    with pytest.raises(ConfigError, match=r"use 0 to 1000000000$"):
        configuration.check_flags(with_value("http", "drain_timeout", float("inf")))


def test_prefix_affinity_without_a_prefix_cache_is_refused() -> None:
    queue = QueueFlags(load_balance_method="prefix_affinity")
    configuration.check_flags(flags(queue=queue))
    with pytest.raises(ConfigError, match="--disable-radix-cache disables them: use one"):
        configuration.check_flags(flags(queue=queue, owners=OwnerFlags(disable_radix_cache=True)))


def test_what_a_group_needs_is_taken_with_it() -> None:
    owners = OwnerFlags(
        dp_size=4,
        enable_dp_attention=True,
        distributed_backend=DistributedBackend.JACCL,
        enable_dp_lm_head=True,
        chunked_prefill_size=4,
    )
    configuration.check_flags(flags(model=ModelFlags(), owners=owners))
    with pytest.raises(ConfigError, match=r"--chunked-prefill-size 3 leaves 0.*at least 4"):
        configuration.check_flags(flags(owners=replace(owners, chunked_prefill_size=3)))


@pytest.mark.parametrize(("group", "share"), [(True, 250), (False, 1000)])
def test_only_the_owners_of_a_group_divide_the_chunk(group: bool, share: int) -> None:
    owners = OwnerFlags(dp_size=4, enable_dp_attention=group, chunked_prefill_size=1000)
    assert configuration.chunked_prefill_size(owners) == share


def test_the_help_names_every_routing_policy() -> None:
    hints = get_type_hints(QueueFlags, include_extras=True)
    help_text = hints["load_balance_method"].__metadata__[0].help
    for method in METHODS:
        assert method in help_text
