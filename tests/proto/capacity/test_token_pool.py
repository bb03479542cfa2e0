"""The one estimate of the tokens that fit into a worker's memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.proto.capacity.model_shape import CacheWindow
from mlx_dp.proto.capacity.ownership import OwnerCapacity, OwnerSlice
from mlx_dp.proto.capacity.parallel import ParallelState
from mlx_dp.proto.capacity.token_pool import (
    cache_nbytes,
    divide_memory,
    overhead_nbytes,
    pool_tokens,
)
from mlx_dp.proto.errors import ConfigError
from tests.support.models.model_shapes import DENSE, GB, HYBRID

STATES_ONLY = replace(HYBRID, attention_layers=0, kv_bytes_per_token=0)
SHARE = OwnerSlice(parallel=ParallelState())


def test_tokens_are_what_weights_and_activations_leave() -> None:
    memory = divide_memory(2 * GB, DENSE, SHARE, prefix_cache=True)
    assert memory.overhead_nbytes == GB // 5
    assert memory.tokens == (2 * GB - GB - GB // 5) // 1000
    assert memory.total_nbytes <= 2 * GB


def test_small_shares_keep_a_least_reserve() -> None:
    assert overhead_nbytes(10_000_000) == 64 * 2**20


def test_asked_tokens_replace_the_profiled_ones() -> None:
    share = replace(SHARE, max_total_tokens=100)
    assert pool_tokens(2 * GB, DENSE, share, prefix_cache=True) == 100


def test_asked_tokens_are_cut_to_what_memory_holds() -> None:
    share = replace(SHARE, max_total_tokens=10**9)
    assert pool_tokens(2 * GB, DENSE, share, prefix_cache=True) == 800_000


def test_weights_that_do_not_fit_are_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"1\.00 GB.*0\.10 GB.*1\.05 GB"):
        divide_memory(1_050_000_000, DENSE, SHARE, prefix_cache=True)


def test_room_for_less_than_one_request_is_refused() -> None:
    memory = GB + overhead_nbytes(GB + GB // 9) + 1999
    with pytest.raises(ConfigError, match="leaves 1 KV tokens"):
        divide_memory(memory, DENSE, SHARE, prefix_cache=True)


def test_states_of_the_asked_slots_are_set_aside() -> None:
    share = replace(SHARE, max_running_requests=8)
    with_cache = divide_memory(2 * GB, HYBRID, share, prefix_cache=True)
    without = divide_memory(2 * GB, HYBRID, share, prefix_cache=False)
    assert with_cache.auxiliary_nbytes == 8 * 4 * 1_000_000
    assert without.auxiliary_nbytes == 8 * 1_000_000


def test_explicit_auxiliary_slots_decide_their_bytes() -> None:
    share = replace(SHARE, max_running_requests=8, max_mamba_cache_size=16)
    memory = divide_memory(2 * GB, HYBRID, share, prefix_cache=True)
    assert memory.auxiliary_nbytes == 16 * 1_000_000


def test_thousands_of_slots_leave_kv_half_of_the_room() -> None:
    memory = divide_memory(2 * GB, HYBRID, SHARE, prefix_cache=True)
    assert memory.auxiliary_nbytes == 400_000_000
    assert memory.kv_nbytes == 400_000_000


def test_a_model_without_attention_has_no_token_pool() -> None:
    memory = divide_memory(2 * GB, STATES_ONLY, SHARE, prefix_cache=True)
    assert memory.tokens is None
    assert memory.auxiliary_nbytes == 800_000_000


def test_unknown_memory_means_one_full_context() -> None:
    assert pool_tokens(None, DENSE, SHARE, prefix_cache=True) == 4096
    assert pool_tokens(None, STATES_ONLY, SHARE, prefix_cache=True) is None
    asked = replace(SHARE, max_total_tokens=100)
    assert pool_tokens(None, DENSE, asked, prefix_cache=True) == 100


WINDOWED = replace(
    DENSE,
    windows=(
        CacheWindow(tokens=100, bytes_per_token=3_000),
        CacheWindow(tokens=10, bytes_per_token=5_000),
    ),
)
WINDOWS_ONLY = replace(WINDOWED, kv_bytes_per_token=0)


@pytest.mark.parametrize(
    ("nbytes", "tokens"),
    [
        (8_999, 0),
        (9_000, 1),
        (90_000, 10),
        (93_999, 10),
        (94_000, 11),
        (450_000, 100),
        (450_999, 100),
        (451_000, 101),
    ],
)
def test_a_window_takes_no_more_once_it_is_full(nbytes: int, tokens: int) -> None:
    assert WINDOWED.longest_request(nbytes) == tokens
    assert WINDOWED.kv_nbytes(tokens) <= nbytes < WINDOWED.kv_nbytes(tokens + 1)


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), max_size=4),
    st.integers(0, 500),
)
def test_the_longest_request_is_the_longest_that_fits(
    per_token: int, windows: list[tuple[int, int]], nbytes: int
) -> None:
    shape = replace(
        DENSE,
        kv_bytes_per_token=per_token,
        windows=tuple(CacheWindow(tokens=n, bytes_per_token=size) for n, size in windows),
    )
    longest = shape.longest_request(nbytes)
    if longest is None:
        assert shape.kv_nbytes(10**9) <= nbytes
    else:
        assert shape.kv_nbytes(longest) <= nbytes < shape.kv_nbytes(longest + 1)


def test_windows_make_room_for_longer_requests() -> None:
    memory = divide_memory(2 * GB, WINDOWED, SHARE, prefix_cache=True)
    assert memory.tokens == (800_000_000 - 50_000 - 300_000) // 1000
    assert memory.cache_nbytes == 800_000_000


def test_windows_that_all_fit_bound_no_request_and_bytes_bound_them_all() -> None:
    memory = divide_memory(2 * GB, WINDOWS_ONLY, SHARE, prefix_cache=True)
    assert memory.tokens is None
    assert memory.cache_nbytes == 800_000_000
    asked = divide_memory(
        2 * GB, WINDOWS_ONLY, replace(SHARE, max_total_tokens=50), prefix_cache=True
    )
    assert (asked.tokens, asked.cache_nbytes) == (50, 50 * 3_000 + 10 * 5_000)


def test_the_budget_is_kv_and_states_in_one() -> None:
    share = replace(SHARE, max_running_requests=8, max_total_tokens=1_000)
    memory = divide_memory(2 * GB, HYBRID, share, prefix_cache=True)
    assert memory.cache_nbytes == 8 * 4 * 1_000_000 + 1_000 * 1_000
    states = divide_memory(2 * GB, STATES_ONLY, SHARE, prefix_cache=True)
    assert states.cache_nbytes == states.auxiliary_nbytes


def test_the_budget_without_known_memory_is_what_the_capacity_holds() -> None:
    capacity = OwnerCapacity(request_slots=2, auxiliary_slots=8, pool_tokens=100)
    assert cache_nbytes(None, HYBRID, SHARE, capacity, prefix_cache=True) == 8_100_000
    endless = replace(capacity, pool_tokens=None)
    assert cache_nbytes(None, STATES_ONLY, SHARE, endless, prefix_cache=True) is None
    known = cache_nbytes(2 * GB, DENSE, SHARE, capacity, prefix_cache=True)
    assert known == 800_000_000
