"""A heartbeat of a worker that serves, for tests."""

from dataclasses import replace
from typing import Any

from mlx_dp.proto.messages.events import Heartbeat, WorkerPhase

SERVING = Heartbeat(
    phase=WorkerPhase.SERVING,
    step=0,
    running=0,
    prefilling=0,
    used_tokens=0,
    reserved_tokens=0,
    auxiliary_used=0,
    rss_nbytes=0,
    device_nbytes=0,
)


def heartbeat(**changes: Any) -> Heartbeat:
    return replace(SERVING, **changes)
