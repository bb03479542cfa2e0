"""The one estimate of what fits into a worker's memory."""

from dataclasses import replace

import pytest
from model_shapes import DENSE, GB, HYBRID

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.ownership import OwnerSlice
from mlx_dp.proto.parallel import ParallelState
from mlx_dp.proto.token_pool import divide_memory, overhead_nbytes, pool_tokens

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
