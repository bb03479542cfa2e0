"""What follows a loss, once no process of the failure domain is left: a restart, or nothing."""

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_dp.orchestrator.control.restart_budget import RestartLimits
from mlx_dp.orchestrator.control.supervisor_steps import GiveUp, Loss, LossKind
from mlx_dp.orchestrator.control.worker_record import FailureDomain
from mlx_dp.orchestrator.service import WorkerStatus
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages import FailureKind

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start its members again, not before this time."""

    time: float


@dataclass(frozen=True, slots=True)
class StayDown:
    """A restart is of no use, for this reason."""

    loss: Loss


def recover(
    domain: FailureDomain, loss: Loss, limits: RestartLimits, rng: random.Random, now: float
) -> RestartAt | StayDown:
    """Decide, and take a restart out of the domain's budget."""
    if loss.kind is LossKind.RESTART or ExitCode.HOST_LOST in domain.exits.values():
        # Nothing went wrong with it, so that it costs neither budget nor patience. Where its
        # machine went, the next start waits for another in any case.
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


def hopeless(
    domains: Iterable[FailureDomain], domain: FailureDomain, loss: Loss
) -> list[FailureDomain]:
    """Those that stay down when this one does."""
    everyone = [*domains]
    if loss.final and not any(member.ready_once for each in everyone for member in each.members):
        # All workers are configured alike: the others would only fail the same way, later.
        return everyone
    return [domain]


def give_up(domain: FailureDomain, loss: Loss, now: float) -> list[GiveUp]:
    """Leave every member down for good."""
    # One that waited for its restart must not be started after all.
    domain.restart_at = None
    steps: list[GiveUp] = []
    for member in domain.members:
        if member.status is WorkerStatus.FAILED:
            continue
        member.move(WorkerStatus.FAILED, now)
        member.message = member.last_cause = loss.detail
        _logger.error("worker %s: failed for good, %s: %s", member.index, member.tag, loss.detail)
        steps.append(GiveUp(member.index, loss))
    return steps


def _is_final(domain: FailureDomain, loss: Loss) -> bool:
    """Whether a restart would fail again. Memory that sufficed once may suffice again."""
    # The next machine to take the place may have what this one had not.
    if not loss.final or domain.remote:
        return False
    ready_once = any(member.ready_once for member in domain.members)
    return not (ready_once and loss.failure is FailureKind.OUT_OF_MEMORY)
