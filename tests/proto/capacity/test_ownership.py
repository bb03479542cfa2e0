"""Ownership: the golden values, and the arithmetic around them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.proto.capacity.ownership import (
    MAX_LIMIT,
    MAX_REQUEST_SLOTS,
    Limits,
    OwnerCapacity,
    Ownership,
    divide,
    resolve_capacity,
)
from mlx_dp.proto.capacity.parallel import MAX_OWNERS, ReplicaMode, resolve_topology
from mlx_dp.proto.errors import ConfigError

PLENTY = 100_000


def own(dp_size=1, *, dp_attention=False, **limits) -> Ownership:
    topology = resolve_topology(dp_size=dp_size, tp_size=None, enable_dp_attention=dp_attention)
    return divide(topology, Limits(**limits))


def capacities(
    ownership: Ownership, *, pool_tokens=PLENTY, hybrid=False, prefix_cache=True
) -> list[OwnerCapacity]:
    return [
        resolve_capacity(share, pool_tokens=pool_tokens, hybrid=hybrid, prefix_cache=prefix_cache)
        for share in ownership.slices
    ]


def slots(ownership: Ownership, **facts) -> list[int]:
    return [capacity.request_slots for capacity in capacities(ownership, **facts)]


def test_each_of_four_replicas_has_all_eight_slots():
    assert slots(own(4, max_running_requests=8)) == [8, 8, 8, 8]


def test_four_dp_attention_owners_share_eight_slots():
    ownership = own(4, dp_attention=True, max_running_requests=8)
    assert slots(ownership) == [2, 2, 2, 2]
    assert (ownership.mode, ownership.warnings) == (ReplicaMode.DP_ATTENTION, ())


def test_auxiliary_slots_are_divided_and_bound_the_requests():
    ownership = own(4, dp_attention=True, max_running_requests=8, max_mamba_cache_size=16)
    for capacity in capacities(ownership, hybrid=True):
        assert (capacity.request_slots, capacity.auxiliary_slots) == (1, 4)
        assert capacity.warnings == (
            "--max-running-requests gives 2 request slots per owner, but 4 auxiliary slots back "
            "only 1",
        )


@pytest.mark.parametrize(("given_slots", "per_owner"), [(15, 3), (4, 1), (3, 0)])
def test_too_few_auxiliary_slots_are_refused_in_the_units_of_the_flag(given_slots, per_owner):
    ownership = own(4, dp_attention=True, max_running_requests=8, max_mamba_cache_size=given_slots)
    with pytest.raises(ConfigError) as refused:
        capacities(ownership, hybrid=True)
    assert str(refused.value) == (
        f"--max-mamba-cache-size {given_slots} leaves {per_owner} auxiliary slots per owner "
        "(attn_dp_size=4), which back 0 requests, since each needs 4: use at least 16, or omit "
        "the flag"
    )


def test_the_advice_of_a_refusal_works():
    ownership = own(4, dp_attention=True, max_running_requests=8, max_mamba_cache_size=16)
    assert slots(ownership, hybrid=True) == [1, 1, 1, 1]
    assert slots(own(4, dp_attention=True, max_running_requests=4)) == [1, 1, 1, 1]


def test_replicas_do_not_divide_auxiliary_slots():
    ownership = own(4, max_running_requests=8, max_mamba_cache_size=16)
    assert slots(ownership, hybrid=True) == [4, 4, 4, 4]


def test_auxiliary_slots_of_one_owner_allow_one_request():
    capacity = capacities(own(max_running_requests=8, max_mamba_cache_size=4), hybrid=True)[0]
    assert (capacity.request_slots, capacity.auxiliary_slots) == (1, 4)


def test_without_the_prefix_cache_one_auxiliary_slot_serves_one_request():
    ownership = own(max_running_requests=8, max_mamba_cache_size=8)
    capacity = capacities(ownership, hybrid=True, prefix_cache=False)[0]
    assert (capacity.request_slots, capacity.auxiliary_slots) == (8, 8)


@pytest.mark.parametrize(("prefix_cache", "ratio"), [(True, 4), (False, 1)])
def test_an_unset_auxiliary_size_follows_the_requests(prefix_cache, ratio):
    ownership = own(4, dp_attention=True, max_running_requests=8)
    for capacity in capacities(ownership, hybrid=True, prefix_cache=prefix_cache):
        assert (capacity.request_slots, capacity.auxiliary_slots) == (2, 2 * ratio)


def test_a_model_without_auxiliary_layers_has_no_auxiliary_slots():
    assert capacities(own(max_mamba_cache_size=1))[0].auxiliary_slots == 0


@pytest.mark.parametrize(
    ("pool_tokens", "expected"), [(1000, 500), (100_000, 4096), (2, 1), (8192, 4096), (None, 4096)]
)
def test_an_unset_limit_follows_the_pool(pool_tokens, expected):
    assert slots(own(), pool_tokens=pool_tokens) == [expected]


@pytest.mark.parametrize("requested", [1, 64, 5000])
def test_a_limit_that_fits_is_honoured_without_a_warning(requested):
    for pool_tokens in (PLENTY, None):
        capacity = capacities(own(max_running_requests=requested), pool_tokens=pool_tokens)[0]
        assert (capacity.request_slots, capacity.warnings) == (requested, ())


def test_a_limit_that_the_pool_cannot_back_is_cut_and_both_are_named():
    capacity = capacities(own(max_running_requests=1000), pool_tokens=100)[0]
    assert capacity.request_slots == 50
    assert capacity.warnings == (
        "--max-running-requests gives 1000 request slots per owner, but 100 KV tokens back only 50",
    )


def test_a_pool_that_backs_no_request_is_refused():
    with pytest.raises(ConfigError, match=r"^a pool of 1 KV tokens backs no request \(each needs"):
        capacities(own(), pool_tokens=1)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ConfigError) as refused:
        own(4, dp_attention=True, max_running_requests=1)
    assert str(refused.value) == (
        "--max-running-requests 1 leaves 0 request slots per owner (attn_dp_size=4): use at "
        "least 4, or omit the flag"
    )
    assert slots(own(4, max_running_requests=1)) == [1, 1, 1, 1]


def test_a_remainder_is_left_over_with_a_warning():
    ownership = own(4, dp_attention=True, max_running_requests=9, max_mamba_cache_size=18)
    assert slots(ownership) == [2, 2, 2, 2]
    assert ownership.warnings == (
        "--max-running-requests 9 is not divisible by attn_dp_size=4: 2 per owner, 1 unused",
        "--max-mamba-cache-size 18 is not divisible by attn_dp_size=4: 4 per owner, 2 unused",
    )


def test_total_tokens_are_never_divided():
    for dp_attention in (False, True):
        ownership = own(4, dp_attention=dp_attention, max_total_tokens=1000)
        assert [share.max_total_tokens for share in ownership.slices] == [1000] * 4


@pytest.mark.parametrize(
    ("flag", "name", "most"),
    [
        ("--max-running-requests", "max_running_requests", MAX_LIMIT),
        ("--max-mamba-cache-size", "max_mamba_cache_size", MAX_LIMIT),
        ("--max-total-tokens", "max_total_tokens", 2**53 - 1),
    ],
)
def test_limits_out_of_range_are_refused(flag, name, most):
    own(**{name: most})
    for value in (0, -1, most + 1):
        with pytest.raises(ConfigError) as refused:
            own(**{name: value})
        assert str(refused.value) == (
            f"{flag} {value} is out of range: use 1 to {most}, or omit the flag"
        )


limits = st.none() | st.integers(1, 10_000)


@given(
    st.integers(1, MAX_OWNERS), st.booleans(), limits, limits, st.none() | st.integers(2, 200_000)
)
def test_owners_never_have_more_than_was_given(dp_size, dp_attention, requests, states, pool):
    try:
        ownership = own(
            dp_size,
            dp_attention=dp_attention,
            max_running_requests=requests,
            max_mamba_cache_size=states,
        )
        found = capacities(ownership, pool_tokens=pool, hybrid=True)
    except ConfigError:
        return
    assert [share.owner for share in ownership.slices] == list(range(dp_size))
    divisor = dp_size if dp_attention else 1
    for capacity in found:
        assert capacity.request_slots >= 1
        assert capacity.request_slots * 4 <= capacity.auxiliary_slots
        assert capacity.request_slots * divisor <= (requests or MAX_REQUEST_SLOTS * divisor)
        assert capacity.auxiliary_slots * divisor <= (states or MAX_LIMIT * divisor)
        assert pool is None or capacity.request_slots * 2 <= pool
