"""Of several ranks that look stuck, the one that the others wait for."""

import pytest

from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.workers.liveness import LivenessLimits
from mlx_dp.orchestrator.control.workers.stalled_rank import stalled_rank
from tests.support.control.heartbeats import heartbeat

LIMITS = LivenessLimits()
NOW = 100.0


def beat(awaits: int | None = None, *, silent_s: float = 0.0) -> Heartbeats:
    heard_at = NOW - silent_s
    return Heartbeats(heard_at=heard_at, progressed_at=0.0, last=heartbeat(awaits_rank=awaits))


@pytest.mark.parametrize(
    ("heartbeats", "expected"),
    [
        pytest.param([beat(1), beat(silent_s=11)], 1, id="one waits for one"),
        pytest.param([beat(2), beat(2), beat(silent_s=11)], 2, id="all wait for one"),
        pytest.param(
            [beat(1), beat(2), beat(silent_s=11)],
            2,
            id="a chain ends at the last",
        ),
        pytest.param(
            [beat(1), beat(silent_s=11), beat(silent_s=11)],
            1,
            id="silence says less",
        ),
        pytest.param([beat(), beat()], None, id="nobody waits"),
        pytest.param([beat(1), beat(0)], None, id="they wait for each other"),
        pytest.param(
            [beat(2), beat(3), beat(), beat()],
            None,
            id="two are waited for",
        ),
        pytest.param([beat(1, silent_s=3), beat()], None, id="what was said is too old"),
        pytest.param([beat(3), beat(), beat()], 3, id="waits for one that is not ready"),
    ],
)
def test_the_one_that_is_waited_for(heartbeats: list[Heartbeats], expected: int | None) -> None:
    found = stalled_rank(dict(enumerate(heartbeats)), LIMITS, lambda index: False, now=NOW)
    assert (None if found is None else found.index) == expected


def test_a_stopped_process_is_the_one_although_all_are_silent() -> None:
    heartbeats = {index: beat(silent_s=11) for index in range(3)}
    found = stalled_rank(heartbeats, LIMITS, lambda index: index == 2, now=NOW)
    assert found is not None
    assert found.index == 2
    assert "stopped by a signal" in found.detail


def test_several_stopped_processes_are_no_one_s_fault_alone() -> None:
    heartbeats = {index: beat(silent_s=11) for index in range(3)}
    assert stalled_rank(heartbeats, LIMITS, lambda index: index > 0, now=NOW) is None


def test_it_is_said_who_waits() -> None:
    found = stalled_rank({0: beat(), 1: beat(0)}, LIMITS, lambda index: False, now=NOW)
    assert found is not None
    assert (found.index, found.detail) == (0, "worker 1 waits for it")
