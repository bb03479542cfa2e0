"""An ended request as the controller tells of it, for tests."""

from mlx_dp.orchestrator.control.counters import RequestTimings
from mlx_dp.proto.messages import FinishReason


def timings() -> RequestTimings:
    return RequestTimings(
        reason=FinishReason.STOP,
        code="",
        prompt_tokens=1,
        output_tokens=1,
        cached_tokens=0,
        owner=0,
        granted_s=0.0,
        first_token_s=0.1,
        last_token_s=0.1,
        ended_s=0.2,
    )
