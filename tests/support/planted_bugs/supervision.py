"""Bugs of the supervisor."""

from itertools import count
from typing import Any

import pytest

from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.event_dispatch import EventDispatch
from mlx_dp.orchestrator.control.state.owner import Hold
from mlx_dp.orchestrator.control.workers import recovery, supervisor
from mlx_dp.orchestrator.control.workers.fleet import Fleet
from mlx_dp.orchestrator.control.workers.health import HealthMonitor
from mlx_dp.orchestrator.control.workers.kill_ladder import mark_lost
from mlx_dp.orchestrator.control.workers.liveness import OwnLag
from mlx_dp.orchestrator.control.workers.record import FailureDomain
from mlx_dp.orchestrator.restart_budget import RestartBudget
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import Up

Patch = pytest.MonkeyPatch


def lost_incarnations_are_heard(patch: Patch) -> None:
    def index_of(fleet: Fleet, identity: str) -> int | None:
        return int(identity[1 : identity.index("-")])

    patch.setattr(Fleet, "index_of", index_of)


def the_streak_is_never_reset(patch: Patch) -> None:
    patch.setattr(RestartBudget, "succeeded", lambda budget: None)


def the_restart_budget_is_endless(patch: Patch) -> None:
    patch.setattr(RestartBudget, "allow", lambda budget, now: True)


def what_cannot_start_is_started_again(patch: Patch) -> None:
    patch.setattr(recovery, "_is_final", lambda domain, loss: False)


def nobody_waits_for_accepted(patch: Patch) -> None:
    patch.setattr(HealthMonitor, "_ignored_message", lambda watch, owner, now: None)
    patch.setattr(HealthMonitor, "unaccepted_in_time", lambda watch, now: [])


def hangs_are_not_seen(patch: Patch) -> None:
    patch.setattr(HealthMonitor, "_judge", lambda watch, owner, now: None)


def our_own_sleep_is_held_against_others(patch: Patch) -> None:
    patch.setattr(OwnLag, "note_call", lambda lag, now, interval_s: 0.0)


def the_old_process_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(FailureDomain, "all_exited", property(lambda domain: True))


def members_of_a_group_survive_each_other(patch: Patch) -> None:
    def only_the_culprit(worker: Any, loss: Any, limits: Any, *, culprit: bool, now: float) -> Any:
        return mark_lost(worker, loss, limits, culprit=culprit, now=now) if culprit else []

    patch.setattr(supervisor, "mark_lost", only_the_culprit)


def nobody_is_killed(patch: Patch) -> None:
    patch.setattr(supervisor, "due_kills", lambda workers, now: [])


def exits_are_never_seen(patch: Patch) -> None:
    """As if children were never reaped."""
    patch.setattr(ControlCore, "process_exited", lambda core, index, status: None)


def the_dead_are_routable(patch: Patch) -> None:
    """While their exit has not settled."""
    exited = ControlCore.process_exited

    def late(core: ControlCore, index: int, status: int) -> None:
        exited(core, index, status)
        core._exits[-1] = (core._exits[-1][0] + 0.5, index, status)
        owner = core.ranks.get(index)
        if owner is not None:
            owner.holds.discard(Hold.CLOSED)

    patch.setattr(ControlCore, "process_exited", late)


def the_dead_are_settled_late(patch: Patch) -> None:
    """They get nothing new, but their buffered commands wait."""
    exited = ControlCore.process_exited

    def late(core: ControlCore, index: int, status: int) -> None:
        exited(core, index, status)
        core._exits[-1] = (core._exits[-1][0] + 1.0, index, status)

    patch.setattr(ControlCore, "process_exited", late)


def a_message_is_received_and_forgotten(patch: Patch) -> None:
    """As if the receive had been cancelled: some events of workers are silently lost."""
    handle, handled = EventDispatch.handle, count(1)

    def forgetful(
        dispatch: EventDispatch, identity: str, event: Up | ProtocolError, now: float
    ) -> None:
        if next(handled) % 50:
            handle(dispatch, identity, event, now)

    patch.setattr(EventDispatch, "handle", forgetful)
