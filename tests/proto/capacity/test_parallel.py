"""Topologies: the meaning of the sizes, and refusals with their advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.proto.capacity.parallel import MAX_OWNERS, ParallelState, ReplicaMode, resolve_topology
from mlx_dp.proto.errors import ConfigError


def members(dp_size, tp_size=None, dp_attention=False):
    topology = resolve_topology(dp_size=dp_size, tp_size=tp_size, enable_dp_attention=dp_attention)
    return topology, tuple(topology.members())


@given(st.integers(1, MAX_OWNERS), st.sampled_from([None, 1]))
def test_replicas_are_independent_and_numbered_by_dp_rank_alone(dp_size, tp_size):
    topology, states = members(dp_size, tp_size)
    assert topology.mode is ReplicaMode.DATA_PARALLEL
    assert (topology.attn_dp_size, topology.warnings) == (1, ())
    assert [state.dp_rank for state in states] == list(range(dp_size))
    assert [state.owner for state in states] == list(range(dp_size))
    for state in states:
        assert (state.dp_size, state.tp_size, state.attn_dp_size) == (dp_size, 1, 1)
        assert (state.tp_rank, state.attn_dp_rank, state.attn_tp_rank) == (0, 0, 0)


@given(st.integers(2, MAX_OWNERS), st.booleans())
def test_dp_attention_is_one_group_with_one_owner_per_process(dp_size, say_tp_size):
    topology, states = members(dp_size, dp_size if say_tp_size else None, dp_attention=True)
    assert topology.mode is ReplicaMode.DP_ATTENTION
    assert topology.attn_dp_size == topology.tp_size == dp_size
    assert [state.owner for state in states] == list(range(dp_size))
    for rank, state in enumerate(states):
        assert (state.dp_rank, state.tp_rank, state.attn_dp_rank) == (rank, rank, rank)
        assert (state.dp_size, state.tp_size, state.attn_dp_size) == (dp_size,) * 3
        assert (state.attn_tp_rank, state.attn_tp_size) == (0, 1)


@pytest.mark.parametrize("tp_size", [None, 1])
def test_dp_attention_over_one_process_is_plain_and_says_so(tp_size):
    topology, states = members(1, tp_size, dp_attention=True)
    assert topology.mode is ReplicaMode.DATA_PARALLEL
    assert states == (ParallelState(),)
    assert topology.warnings == (
        "--enable-dp-attention does nothing with --dp-size 1: there is only one owner",
    )


@pytest.mark.parametrize(
    ("dp_size", "tp_size", "dp_attention", "advice"),
    [
        (0, None, False, "--dp-size 0 is out of range: use 1 to 64"),
        (-3, None, True, "--dp-size -3 is out of range: use 1 to 64"),
        (65, None, False, "--dp-size 65 is out of range: use 1 to 64"),
        (2, 0, True, "--tp-size 0 is out of range: use 1 to 64"),
        (2, 65, True, "--tp-size 65 is out of range: use 1 to 64"),
        (
            2,
            4,
            False,
            "--tp-size 4 needs --enable-dp-attention: plain replicas hold the whole model, so "
            "leave --tp-size at 1",
        ),
        (
            4,
            1,
            True,
            "--tp-size 1 is not divisible by --dp-size 4: with --enable-dp-attention use "
            "--tp-size 4, or omit it",
        ),
        (
            3,
            4,
            True,
            "--tp-size 4 is not divisible by --dp-size 3: with --enable-dp-attention use "
            "--tp-size 3, or omit it",
        ),
        (
            2,
            4,
            True,
            "--tp-size 4 with --dp-size 2 would split one owner's attention over 2 processes, "
            "and a ring cannot be split: use --dp-size 4",
        ),
        (
            1,
            4,
            True,
            "--tp-size 4 with --dp-size 1 would split one owner's attention over 4 processes, "
            "and a ring cannot be split: use --dp-size 4",
        ),
    ],
)
def test_other_sizes_are_refused_with_what_would_work(dp_size, tp_size, dp_attention, advice):
    with pytest.raises(ConfigError) as refused:
        members(dp_size, tp_size, dp_attention)
    assert str(refused.value) == advice


@given(st.integers(-5, 80), st.none() | st.integers(-5, 80), st.booleans())
def test_a_topology_never_has_other_sizes_than_asked_for(dp_size, tp_size, dp_attention):
    try:
        topology, states = members(dp_size, tp_size, dp_attention)
    except ConfigError:
        return
    assert (topology.dp_size, len(states)) == (dp_size, dp_size)
    assert tp_size in (None, topology.tp_size)


@pytest.mark.parametrize("name", ["dp", "tp", "attn_dp", "attn_tp"])
def test_a_rank_is_below_its_size(name):
    with pytest.raises(ValueError, match=f"{name}_rank 2 is not below {name}_size 2"):
        ParallelState(**{f"{name}_rank": 2, f"{name}_size": 2})
