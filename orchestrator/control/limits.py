"""All time limits and bounds of the controller; flags set some of them."""

from dataclasses import dataclass, field
from typing import Final

from mlx_dp.orchestrator.control.workers.liveness import LivenessLimits
from mlx_dp.orchestrator.control.workers.start_queue import StartLimits
from mlx_dp.orchestrator.control.workers.supervisor import SupervisorLimits
from mlx_dp.orchestrator.options import WorkerOptions
from mlx_dp.orchestrator.restart_budget import RestartLimits

# These scale with the time-out: a shorter one also expects faster prefills.
_PREFILL_TOKENS_A_TIMEOUT: Final = 100.0
_FIRST_STEP_RATIO: Final = 3.0
_LONGEST_FIRST_STEP_RATIO: Final = 12.0
_LONGEST_STEP_RATIO: Final = 30.0
_LONGEST_DELAY_RATIO: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """``ahead``: requests that an owner may be granted beyond its slots.

    ``exit_settle_s``: time from an exit to its handling, in which the last messages are read.
    ``stop_grace_s``: time from ``Shutdown`` to SIGKILL. ``restart_drain_s``: time that the only
    worker gets to finish its requests before a requested restart.
    """

    max_attempts: int = 3
    ahead: int = 0
    tick_s: float = 0.1
    lag_tolerance_s: float = 1.0
    exit_settle_s: float = 0.02
    stop_grace_s: float = 5.0
    restart_drain_s: float = 30.0
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    supervisor: SupervisorLimits = field(default_factory=SupervisorLimits)


def control_limits(worker: WorkerOptions) -> ControlLimits:
    """Derive limits from the worker options; all others keep their defaults."""
    return ControlLimits(
        liveness=LivenessLimits(
            heartbeat_interval_s=worker.heartbeat_interval_s,
            hang_timeout_s=worker.hang_timeout_s,
            slowest_prefill_tokens_per_s=_PREFILL_TOKENS_A_TIMEOUT / worker.hang_timeout_s,
            first_step_s=_FIRST_STEP_RATIO * worker.hang_timeout_s,
            longest_first_step_s=_LONGEST_FIRST_STEP_RATIO * worker.hang_timeout_s,
            longest_step_s=_LONGEST_STEP_RATIO * worker.hang_timeout_s,
        ),
        supervisor=SupervisorLimits(
            start=StartLimits(start_timeout_s=worker.start_timeout_s),
            restart=RestartLimits(
                max_restarts=worker.max_restarts,
                window_s=worker.restart_window_s,
                first_delay_s=worker.restart_delay_s,
                longest_delay_s=_LONGEST_DELAY_RATIO * worker.restart_delay_s,
            ),
        ),
    )
