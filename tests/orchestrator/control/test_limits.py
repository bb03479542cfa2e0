"""The times of the controller, as flags scale them."""

from mlx_dp.orchestrator.control.limits import control_limits
from mlx_dp.orchestrator.control.workers.liveness import LivenessLimits
from mlx_dp.orchestrator.options import WorkerOptions


def test_the_times_of_liveness_are_its_own_unless_flags_say_otherwise() -> None:
    assert control_limits(WorkerOptions()).liveness == LivenessLimits()


def test_a_shorter_hang_timeout_expects_faster_prefills() -> None:
    liveness = control_limits(WorkerOptions(hang_timeout_s=1.0)).liveness
    assert liveness.hang_timeout_s == 1.0
    assert liveness.slowest_prefill_tokens_per_s == 100.0
    assert liveness.first_step_s == 3.0
