"""The stalled rank: of several ranks that look stuck, the one that the others wait for."""

import pytest

from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.workers.liveness import LivenessLimits
from mlx_dp.orchestrator.control.workers.stalled_rank import stalled_rank
from tests.support.control.heartbeats import heartbeat

LIMITS = LivenessLimits()
NOW = 100.0


def record(awaits: int | None = None, *, silent_s: float = 0.0) -> Heartbeats:
    heard_at = NOW - silent_s
    return Heartbeats(heard_at=heard_at, progressed_at=0.0, last=heartbeat(awaits_rank=awaits))


@pytest.mark.parametrize(
    ("heartbeats", "expected"),
    [
        pytest.param([record(1), record(silent_s=11)], 1, id="one rank waits for another"),
        pytest.param(
            [record(2), record(2), record(silent_s=11)], 2, id="all wait for the same rank"
        ),
        pytest.param(
            [record(1), record(2), record(silent_s=11)],
            2,
            id="a chain ends at the last",
        ),
        pytest.param(
            [record(1), record(silent_s=11), record(silent_s=11)],
            1,
            id="waiting outranks silence",
        ),
        pytest.param([record(), record()], None, id="no rank waits"),
        pytest.param([record(1), record(0)], None, id="ranks wait for each other"),
        pytest.param(
            [record(2), record(3), record(), record()],
            None,
            id="ranks wait for two others",
        ),
        pytest.param([record(1, silent_s=3), record()], None, id="stale heartbeat"),
        pytest.param([record(3), record(), record()], 3, id="waits for a rank that is not ready"),
    ],
)
def test_the_stalled_rank_is_found(heartbeats: list[Heartbeats], expected: int | None) -> None:
    found = stalled_rank(dict(enumerate(heartbeats)), LIMITS, lambda index: False, now=NOW)
    assert (None if found is None else found.index) == expected


def test_a_stopped_process_is_the_stalled_rank_although_all_are_silent() -> None:
    heartbeats = {index: record(silent_s=11) for index in range(3)}
    found = stalled_rank(heartbeats, LIMITS, lambda index: index == 2, now=NOW)
    assert found is not None
    assert found.index == 2
    assert "stopped by a signal" in found.detail


def test_several_stopped_processes_name_no_stalled_rank() -> None:
    heartbeats = {index: record(silent_s=11) for index in range(3)}
    assert stalled_rank(heartbeats, LIMITS, lambda index: index > 0, now=NOW) is None


def test_the_waiting_ranks_are_named() -> None:
    found = stalled_rank({0: record(), 1: record(0)}, LIMITS, lambda index: False, now=NOW)
    assert found is not None
    assert (found.index, found.detail) == (0, "worker 1 waits for it")
