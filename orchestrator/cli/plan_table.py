"""A plan as a table for people and as JSON for programs."""

from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mlx_dp.orchestrator.config.plan import PlannedOwner, PlannedWeights, ServicePlan
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.messages.batching import Batching

_REMOTE: Final = "remote"


def plan_view(plan: ServicePlan) -> Group:
    """The plan in a few lines around the table of owners."""
    title = Text(_title(plan), style="bold")
    return Group(title, *_weights_lines(plan), plan_table(plan), *_remote_lines(plan))


def plan_table(plan: ServicePlan) -> Table:
    """One line per owner, without the columns that do not apply to this model."""
    with_memory = any(owner.weights_nbytes is not None for owner in plan.owners)
    with_states = any(owner.capacity and owner.capacity.auxiliary_slots for owner in plan.owners)
    table = Table()
    for heading in _headings(with_memory=with_memory, with_states=with_states):
        table.add_column(heading, justify="right")
    for owner in plan.owners:
        table.add_row(*_cells(owner, with_memory=with_memory, with_states=with_states))
    return table


def plan_json(plan: ServicePlan) -> dict[str, Any]:
    """All figures, in bytes and counts."""
    model = plan.model
    return {
        "model": model.served_name,
        "model_path": None if model.path is None else str(model.path),
        "mode": plan.ownership.mode.value,
        "device": None if model.device is None else model.device.kind,
        "device_name": None if model.device is None else model.device.name,
        # Other models choose the form of their batch at load.
        "batching": None if model.unbatchable is None else Batching.ONE_BY_ONE.value,
        "memory_share_nbytes": plan.share_nbytes,
        "weights": _weights_json(plan.weights),
        "owners": [_owner_json(owner) for owner in plan.owners],
        "warnings": list(plan.warnings),
    }


def _title(plan: ServicePlan) -> str:
    count = len(plan.owners)
    processes = f"{count} process" if count == 1 else f"{count} processes"
    mode = plan.ownership.mode
    words = f"one group of {processes}" if mode is ReplicaMode.DP_ATTENTION else processes
    return f"{plan.model.served_name}: {mode.value}, {words}"


def _weights_lines(plan: ServicePlan) -> list[Text]:
    """The parts that a group holds once, and those that each rank holds: the reason for groups."""
    weights = plan.weights
    if weights is None or plan.ownership.mode is ReplicaMode.DATA_PARALLEL:
        return []
    count = len(weights.by_process)
    return [
        Text(
            f"weights: {_size(weights.whole_nbytes)}, of which {_size(weights.divided_nbytes)} are "
            f"divided by {count} and {_size(weights.repeated_nbytes)} are held by each: "
            f"{_size(weights.total_nbytes)} in all, where replicas would take "
            f"{_size(weights.whole_nbytes * count)}"
        )
    ]


def _remote_lines(plan: ServicePlan) -> list[Text]:
    there = [str(owner.owner) for owner in plan.owners if owner.capacity is None]
    if not there:
        return []
    which = (
        f"owner {there[0]}: what it" if len(there) == 1 else f"owners {', '.join(there)}: what each"
    )
    return [Text(f"{which} can hold is decided on its machine")]


def _weights_json(weights: PlannedWeights | None) -> dict[str, Any] | None:
    if weights is None:
        return None
    return {
        "whole_nbytes": weights.whole_nbytes,
        "divided_nbytes": weights.divided_nbytes,
        "repeated_nbytes": weights.repeated_nbytes,
        "by_process": list(weights.by_process),
        "total_nbytes": weights.total_nbytes,
    }


def _headings(*, with_memory: bool, with_states: bool) -> list[str]:
    headings = ["owner", "process", "request slots"]
    headings += ["auxiliary slots"] if with_states else []
    headings += ["KV tokens"]
    if with_memory:
        headings += ["weights", "KV"]
        headings += ["states"] if with_states else []
        headings += ["reserve"]
    return headings


def _cells(owner: PlannedOwner, *, with_memory: bool, with_states: bool) -> list[str]:
    capacity, memory = owner.capacity, owner.memory
    cells = [str(owner.owner), str(owner.process)]
    if capacity is None:
        return [*cells, *_remote_cells(owner, with_memory=with_memory, with_states=with_states)]
    cells += [f"{capacity.request_slots:,}"]
    cells += [f"{capacity.auxiliary_slots:,}"] if with_states else []
    cells += ["-" if capacity.pool_tokens is None else f"{capacity.pool_tokens:,}"]
    if with_memory and memory is not None:
        cells += [_size(memory.weights_nbytes), _size(memory.kv_nbytes)]
        cells += [_size(memory.auxiliary_nbytes)] if with_states else []
        cells += [_size(memory.overhead_nbytes)]
    return cells


def _remote_cells(owner: PlannedOwner, *, with_memory: bool, with_states: bool) -> list[str]:
    """Before a remote worker has started, only its weights are known."""
    cells = ["-", *(["-"] if with_states else []), _REMOTE]
    if with_memory:
        weights = "-" if owner.weights_nbytes is None else _size(owner.weights_nbytes)
        cells += [weights, "-", *(["-"] if with_states else []), "-"]
    return cells


def _owner_json(owner: PlannedOwner) -> dict[str, Any]:
    capacity, memory = owner.capacity, owner.memory
    return {
        "owner": owner.owner,
        "process": owner.process,
        "decided_on_its_machine": capacity is None,
        "request_slots": None if capacity is None else capacity.request_slots,
        "auxiliary_slots": None if capacity is None else capacity.auxiliary_slots,
        "kv_tokens": None if capacity is None else capacity.pool_tokens,
        "weights_nbytes": owner.weights_nbytes,
        "kv_nbytes": None if memory is None else memory.kv_nbytes,
        "states_nbytes": None if memory is None else memory.auxiliary_nbytes,
        "reserve_nbytes": None if memory is None else memory.overhead_nbytes,
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
