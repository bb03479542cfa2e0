"""Recovery: whether, and when, a failure domain is restarted after a loss; which ones stay down."""

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.control.workers.actions import GiveUp, Loss
from mlx_dp.orchestrator.control.workers.record import FailureDomain
from mlx_dp.orchestrator.restart_budget import RestartLimits
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import FailureKind

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start the members of the domain again, not before this time."""

    time: float


@dataclass(frozen=True, slots=True)
class StayDown:
    """A restart cannot help, for this reason."""

    loss: Loss


def decide_recovery(
    domain: FailureDomain, loss: Loss, limits: RestartLimits, rng: random.Random, now: float
) -> RestartAt | StayDown:
    """Decide whether to restart the domain; a restart is charged to its budget."""
    if loss.kind is LossKind.RESTART or ExitCode.HOST_LOST in domain.exits.values():
        # The worker did nothing wrong: this costs no budget, and needs no delay. If its machine
        # was lost, the next start waits for another one anyway.
        domain.ready_since = None
        return RestartAt(now)
    if _is_final(domain, loss):
        return StayDown(loss)
    healthy_s = 0.0 if domain.ready_since is None else now - domain.ready_since
    domain.ready_since = None
    if not domain.budget.allow(now):
        detail = f"{loss.detail} ({limits.max_restarts} restarts did not help)"
        return StayDown(Loss(kind=loss.kind, detail=detail, failure=FailureKind.INTERNAL))
    delay = domain.back_off.delay(healthy_s, rng)
    for member in domain.members:
        _logger.info("worker %s: restarts in %.2f s, %s", member.index, delay, member.tag)
    return RestartAt(now + delay)


def domains_given_up(
    domains: Iterable[FailureDomain], domain: FailureDomain, loss: Loss
) -> list[FailureDomain]:
    """Return the domains that fail for good when this one does."""
    all_domains = [*domains]
    if loss.final and not any(member.ready_once for each in all_domains for member in each.members):
        # All workers are configured alike: the others would fail the same way later.
        return all_domains
    return [domain]


def mark_failed(domain: FailureDomain, loss: Loss, now: float) -> list[GiveUp]:
    """Mark every member as failed for good."""
    # A member that waited for its restart must not be started any more.
    domain.restart_at = None
    actions: list[GiveUp] = []
    for member in domain.members:
        if member.status is WorkerStatus.FAILED:
            continue
        member.change_status(WorkerStatus.FAILED, now)
        member.message = member.last_cause = loss.detail
        _logger.error("worker %s: failed for good, %s: %s", member.index, member.tag, loss.detail)
        actions.append(GiveUp(member.index, loss))
    return actions


def _is_final(domain: FailureDomain, loss: Loss) -> bool:
    """Whether a restart would fail again. Memory that was enough once may be enough again."""
    # Another machine may take the place, and have what this one lacks.
    if not loss.final or domain.any_remote:
        return False
    ready_once = any(member.ready_once for member in domain.members)
    return not (ready_once and loss.failure is FailureKind.OUT_OF_MEMORY)
