"""The plan: owners, bytes and refusals, as the workers will have them."""

from pathlib import Path

import pytest
from flag_values import flags
from model_shapes import DENSE, GB, HYBRID

from mlx_dp.orchestrator import configuration
from mlx_dp.orchestrator.flags import FakeFlags, Flags, ModelFlags, OwnerFlags
from mlx_dp.orchestrator.model.model_probe import DeviceFacts
from mlx_dp.orchestrator.plan import ServicePlan, make_plan
from mlx_dp.orchestrator.plan_table import plan_json, plan_table, plan_view
from mlx_dp.orchestrator.preparation import PreparedModel
from mlx_dp.orchestrator.process.memory_share import SharedMemory
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.model_shape import ModelShape
from mlx_dp.proto.rank_weights import RankWeights

FAKE = PreparedModel(served_name="fake")


def real(
    shape: ModelShape, *, nbytes: int = 5 * GB, rank_weights: RankWeights | None = None
) -> PreparedModel:
    return PreparedModel(
        served_name="m",
        path=Path("/models/m"),
        shape=shape,
        rank_weights=rank_weights,
        device=DeviceFacts(
            kind="cpu", name="cpu", memory_nbytes=10 * GB, working_set_nbytes=10 * GB
        ),
        memory=SharedMemory(nbytes=nbytes, devices=1, description="half of the RAM"),
    )


def planned(given: Flags, model: PreparedModel = FAKE) -> ServicePlan:
    return make_plan(given, configuration.ownership(given.owners), model)


def slots(plan: ServicePlan) -> list[int]:
    return [owner.capacity.request_slots for owner in plan.owners]


def test_replicas_have_the_whole_limit_each() -> None:
    assert slots(planned(flags(owners=OwnerFlags(dp_size=4, max_running_requests=8)))) == [8] * 4


def test_owners_of_a_group_share_the_limit() -> None:
    owners = OwnerFlags(dp_size=4, tp_size=4, enable_dp_attention=True, max_running_requests=8)
    plan = planned(flags(owners=owners))
    assert slots(plan) == [2] * 4
    assert [owner.owner for owner in plan.owners] == [0, 1, 2, 3]
    assert plan.warnings == ()
    assert plan.weights is None


GROUP = OwnerFlags(dp_size=2, enable_dp_attention=True)


def test_a_rank_is_charged_for_what_it_holds() -> None:
    weights = RankWeights(nbytes=(600_000_000, 500_000_000))
    plan = planned(flags(owners=GROUP, model=ModelFlags()), real(DENSE, rank_weights=weights))
    held = [owner.memory.weights_nbytes for owner in plan.owners if owner.memory]
    assert held == [600_000_000, 500_000_000]
    more, most = (owner.capacity.pool_tokens for owner in plan.owners)
    assert most - more == 100_000_000 // DENSE.kv_bytes_per_token
    assert plan.weights is not None
    # 100 MB are the same in both, the rest of the 1 GB is there once.
    assert plan.weights.repeated_nbytes == 100_000_000
    assert plan.weights.divided_nbytes == 900_000_000
    assert plan_json(plan)["weights"] == {
        "whole_nbytes": GB,
        "divided_nbytes": 900_000_000,
        "repeated_nbytes": 100_000_000,
        "by_process": [600_000_000, 500_000_000],
        "total_nbytes": 1_100_000_000,
    }
    lines = [str(each) for each in plan_view(plan).renderables]
    assert lines[1] == (
        "weights: 1.00 GB, of which 0.90 GB are divided by 2 and 0.10 GB are held by each: "
        "1.10 GB in all, where replicas would take 2.00 GB"
    )


def test_replicas_hold_the_weights_each() -> None:
    plan = planned(flags(owners=OwnerFlags(dp_size=2), model=ModelFlags()), real(DENSE))
    assert plan.weights is not None
    assert (plan.weights.repeated_nbytes, plan.weights.divided_nbytes) == (GB, 0)
    assert plan.weights.total_nbytes == 2 * GB
    assert len(plan_view(plan).renderables) == 2


def test_a_group_fits_where_replicas_do_not() -> None:
    with pytest.raises(ConfigError, match="use --dp-size 1"):
        planned(flags(owners=OwnerFlags(dp_size=2), model=ModelFlags()), real(DENSE, nbytes=2 * GB))
    weights = RankWeights(nbytes=(600_000_000, 600_000_000))
    model = real(DENSE, nbytes=2 * GB, rank_weights=weights)
    assert planned(flags(owners=GROUP, model=ModelFlags()), model).share_nbytes == 800_000_000


def test_fewer_ranks_are_no_help_to_a_group_that_does_not_fit() -> None:
    model = real(DENSE, nbytes=GB, rank_weights=RankWeights(nbytes=(600_000_000,) * 2))
    with pytest.raises(ConfigError, match="use a smaller or more quantised model") as refused:
        planned(flags(owners=GROUP, model=ModelFlags()), model)
    assert "--dp-size" not in str(refused.value)


def test_the_rank_that_holds_most_has_to_fit() -> None:
    uneven = real(DENSE, nbytes=GB, rank_weights=RankWeights(nbytes=(100_000_000, 390_000_000)))
    with pytest.raises(ConfigError, match=r"0\.39 GB of weights"):
        planned(flags(owners=GROUP, model=ModelFlags()), uneven)


def test_a_model_that_ranks_cannot_divide_is_refused_with_the_reason() -> None:
    model = real(DENSE, rank_weights=RankWeights(refusal="layer 0 has no MLP: use data-parallel"))
    with pytest.raises(ConfigError, match="layer 0 has no MLP: use data-parallel"):
        planned(flags(owners=GROUP, model=ModelFlags()), model)


@pytest.mark.parametrize(("auxiliary", "named"), [(15, "leaves 3"), (4, "leaves 1")])
def test_auxiliary_slots_that_back_nothing_are_refused(auxiliary: int, named: str) -> None:
    owners = OwnerFlags(dp_size=4, enable_dp_attention=True, max_mamba_cache_size=auxiliary)
    with pytest.raises(ConfigError, match=f"{auxiliary} {named}.*at least 16"):
        planned(flags(owners=owners, fake=FakeFlags(fake_hybrid=True)))


def test_hybrids_are_held_to_their_auxiliary_slots() -> None:
    owners = OwnerFlags(
        dp_size=4, enable_dp_attention=True, max_running_requests=8, max_mamba_cache_size=16
    )
    plan = planned(flags(owners=owners, model=ModelFlags()), real(HYBRID, nbytes=20 * GB))
    assert slots(plan) == [1] * 4
    assert {owner.capacity.auxiliary_slots for owner in plan.owners} == {4}
    memory = plan.owners[0].memory
    assert memory is not None
    assert memory.auxiliary_nbytes == 4_000_000


def test_memory_is_shared_and_the_pool_fits_into_it() -> None:
    plan = planned(flags(owners=OwnerFlags(dp_size=2), model=ModelFlags()), real(DENSE))
    assert plan.share_nbytes == 2 * GB
    memory = plan.owners[0].memory
    assert memory is not None
    assert memory.total_nbytes <= 2 * GB
    assert plan.owners[0].capacity.pool_tokens == memory.tokens == 800_000
    assert slots(plan) == [4096, 4096]


def test_workers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="use --dp-size 3"):
        planned(flags(owners=OwnerFlags(dp_size=4), model=ModelFlags()), real(DENSE))


def test_asking_for_more_tokens_than_fit_is_said_once() -> None:
    owners = OwnerFlags(dp_size=2, max_total_tokens=10**9)
    plan = planned(flags(owners=owners, model=ModelFlags()), real(DENSE))
    assert plan.warnings == (
        "--max-total-tokens 1000000000 is more than one worker can hold: 800000 are used",
    )


def test_the_table_shows_only_columns_with_a_meaning() -> None:
    headings = [str(column.header) for column in plan_table(planned(flags())).columns]
    assert headings == ["owner", "process", "request slots", "KV tokens"]
    owners = OwnerFlags(max_running_requests=2)
    hybrid = planned(flags(owners=owners, model=ModelFlags()), real(HYBRID))
    headings = [str(column.header) for column in plan_table(hybrid).columns]
    assert headings[3:] == ["auxiliary slots", "KV tokens", "weights", "KV", "states", "reserve"]


def test_json_has_every_figure() -> None:
    shown = plan_json(planned(flags(model=ModelFlags()), real(HYBRID)))
    assert shown["memory_share_nbytes"] == 4 * GB
    (owner,) = shown["owners"]
    assert set(owner) >= {"owner", "process", "request_slots", "auxiliary_slots", "kv_tokens"}
    parts = ("weights_nbytes", "kv_nbytes", "states_nbytes", "reserve_nbytes")
    assert sum(owner[part] for part in parts) <= 4 * GB


@pytest.mark.parametrize(("model", "limit"), [(FAKE, 8192), (real(DENSE), 4096)])
def test_a_context_beyond_the_models_is_refused(model: PreparedModel, limit: int) -> None:
    asked = limit + 1
    with pytest.raises(ConfigError, match=f"--context-length {asked} exceeds the model's {limit}:"):
        planned(flags(model=ModelFlags(context_length=asked)), model)
    planned(flags(model=ModelFlags(context_length=limit)), model)


def test_flags_that_do_nothing_are_named() -> None:
    plan = planned(flags(model=ModelFlags(model="x"), owners=OwnerFlags(max_mamba_cache_size=15)))
    assert plan.warnings == (
        "--model does nothing with --engine fake, which needs no model",
        "--max-mamba-cache-size does nothing: this model has no auxiliary states",
    )
