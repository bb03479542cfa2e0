"""The plan: owners, bytes and refusals, as the workers will have them."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mlx_dp.orchestrator.cli.plan_table import plan_json, plan_table, plan_view
from mlx_dp.orchestrator.config import configuration
from mlx_dp.orchestrator.config.flags import FakeFlags, Flags, ModelFlags, OwnerFlags, RemoteFlags
from mlx_dp.orchestrator.config.memory_share import SharedMemory
from mlx_dp.orchestrator.config.plan import ServicePlan, make_plan
from mlx_dp.orchestrator.config.preparation import PreparedModel
from mlx_dp.orchestrator.model.model_probe import DeviceFacts
from mlx_dp.proto.capacity.model_shape import ModelShape, RankWeights
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.group import DistributedBackend
from tests.support.control.flag_values import flags
from tests.support.models.model_shapes import DENSE, GB, HYBRID

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
    # 100 MB are the same in both, the rest of the 1 GB is counted once.
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


def test_a_model_that_no_batch_can_hold_is_planned_with_a_warning() -> None:
    model = replace(real(DENSE), unbatchable="no batch can hold ChunkedKVCache caches")
    plan = planned(flags(model=ModelFlags()), model)
    assert plan_json(plan)["batching"] == "one_by_one"
    said = "requests will run one by one: no batch can hold ChunkedKVCache caches"
    assert said in plan.warnings
    # Whether other models batch is only known when they are loaded.
    assert plan_json(planned(flags(model=ModelFlags()), real(DENSE)))["batching"] is None


@pytest.mark.parametrize(("model", "limit"), [(FAKE, 8192), (real(DENSE), 4096)])
def test_a_context_beyond_the_models_is_refused(model: PreparedModel, limit: int) -> None:
    asked = limit + 1
    with pytest.raises(ConfigError, match=f"--context-length {asked} exceeds the model's {limit}:"):
        planned(flags(model=ModelFlags(context_length=asked)), model)
    planned(flags(model=ModelFlags(context_length=limit)), model)


def test_flags_that_do_nothing_for_this_model_are_named() -> None:
    owners = OwnerFlags(max_mamba_cache_size=15, max_total_tokens=15)
    assert planned(flags(owners=owners)).warnings == (
        "--max-mamba-cache-size does nothing: this model has no auxiliary states",
    )
    model = real(replace(DENSE, kv_bytes_per_token=0))
    assert "--max-total-tokens does nothing: this model has no attention KV" in (
        planned(flags(model=ModelFlags(), owners=owners), model).warnings
    )


def tight(tokens: int) -> PreparedModel:
    """A model whose only worker has memory for this many tokens beside weights and reserve."""
    nbytes = DENSE.weights_nbytes + tokens * DENSE.kv_bytes_per_token
    # A tenth is the reserve, and four fifths of the device are divided.
    return real(DENSE, nbytes=round(nbytes / 0.9 / 0.8) + 100)


def test_a_pool_that_holds_no_chat_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError) as refused:
        planned(flags(model=ModelFlags()), tight(580))
    assert str(refused.value) == (
        "1 worker with 1.11 GB each hold 580 KV tokens each, after 1.00 GB of weights, 0.11 GB "
        "for activations, and a chat needs 1,024: use a larger --mem-fraction-static or a smaller "
        "model, or --max-total-tokens 580 if so few will do"
    )


def test_a_pool_below_the_context_is_warned_of() -> None:
    plan = planned(flags(model=ModelFlags()), tight(2000))
    assert plan.warnings == (
        "each worker holds 2,000 KV tokens, and the model's context is 4,096: longer requests are "
        "refused; a smaller model or a larger --mem-fraction-static would leave more",
    )
    assert planned(flags(model=ModelFlags()), tight(4096)).warnings == ()
    assert planned(flags(model=ModelFlags(context_length=2000)), tight(2000)).warnings == ()


def test_so_few_tokens_as_were_asked_for_are_neither_refused_nor_warned_of() -> None:
    for asked in (580, 20):
        owners = OwnerFlags(max_total_tokens=asked)
        plan = planned(flags(model=ModelFlags(), owners=owners), tight(580))
        assert plan.owners[0].capacity.pool_tokens == asked
        assert plan.warnings == ()
    with pytest.raises(ConfigError, match="hold 580 KV tokens"):
        planned(flags(model=ModelFlags(), owners=OwnerFlags(max_total_tokens=10**6)), tight(580))


def test_the_most_workers_that_would_hold_a_chat_are_named() -> None:
    # Of 5 GB each of three gets 1.33, of which 0.2 are left; each of two 2 GB.
    wide = replace(DENSE, kv_bytes_per_token=400_000)
    with pytest.raises(ConfigError, match=r"3 workers .* hold 500 KV .*: use --dp-size 2, a"):
        planned(flags(model=ModelFlags(), owners=OwnerFlags(dp_size=3)), real(wide))


def test_a_model_of_short_context_needs_no_more_than_that() -> None:
    short = replace(DENSE, context_length=64, kv_bytes_per_token=4_000_000)
    plan = planned(flags(model=ModelFlags()), real(short, nbytes=2 * GB))
    assert plan.owners[0].capacity.pool_tokens < 1024
    assert plan.warnings == ()


def test_a_backend_that_mlx_was_not_built_with_is_refused() -> None:
    owners = replace(GROUP, distributed_backend=DistributedBackend.JACCL)
    model = real(DENSE, rank_weights=RankWeights(nbytes=(GB // 2, GB // 2)))
    with pytest.raises(ConfigError, match="--distributed-backend jaccl is not in this machine's"):
        planned(flags(model=ModelFlags(), owners=owners), model)
    there = replace(model, device=replace(model.device, backends=("ring", "jaccl")))
    assert planned(flags(model=ModelFlags(), owners=owners), there)


REMOTE = RemoteFlags(remote_workers=1, dist_init_addr="127.0.0.1:0")


def test_a_remote_worker_is_decided_on_its_own_machine() -> None:
    given = flags(model=ModelFlags(), owners=OwnerFlags(dp_size=2), remote=REMOTE)
    plan = planned(given, real(DENSE))
    # The local one has all of this machine.
    assert plan.share_nbytes == 4 * GB
    here, there = plan.owners
    assert here.capacity is not None
    assert (there.capacity, there.memory) == (None, None)
    shown = io.StringIO()
    Console(file=shown, width=100).print(plan_view(plan))
    assert "owner 1: what it can hold is decided on its machine\n" in shown.getvalue()
    local, remote = plan_json(plan)["owners"]
    assert (local["decided_on_its_machine"], remote["decided_on_its_machine"]) == (False, True)
    assert (remote["kv_tokens"], remote["kv_nbytes"]) == (None, None)
    assert remote["weights_nbytes"] == GB


def test_a_model_that_fits_only_other_machines_is_not_refused_here(tmp_path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]')
    remote = RemoteFlags(hostfile=hosts, dist_init_addr="127.0.0.1:0")
    owners = replace(GROUP, distributed_backend=DistributedBackend.JACCL)
    model = real(DENSE, nbytes=GB // 4, rank_weights=RankWeights(nbytes=(GB, GB)))
    plan = planned(flags(model=ModelFlags(), owners=owners, remote=remote), model)
    assert plan.share_nbytes is None
    assert [owner.capacity for owner in plan.owners] == [None, None]


def test_what_the_flags_alone_rule_out_is_refused_for_remote_workers_too() -> None:
    owners = OwnerFlags(dp_size=2, max_mamba_cache_size=3)
    with pytest.raises(ConfigError, match="--max-mamba-cache-size 3 leaves 3"):
        planned(flags(model=ModelFlags(), owners=owners, remote=REMOTE), real(HYBRID))
