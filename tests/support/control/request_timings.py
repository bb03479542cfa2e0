"""The controller's record of an ended request, for tests."""

from mlx_dp.orchestrator.service_counters import RequestTimings
from mlx_dp.proto.messages.events import FinishReason


def timings(*, granted_s: float | None = 0.0, ended_s: float = 0.2) -> RequestTimings:
    return RequestTimings(
        reason=FinishReason.STOP,
        code="",
        prompt_tokens=1,
        output_tokens=1,
        cached_tokens=0,
        dp_rank=0,
        granted_s=granted_s,
        first_token_s=ended_s,
        last_token_s=ended_s,
        ended_s=ended_s,
    )
