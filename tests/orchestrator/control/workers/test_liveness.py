"""Judging a worker by its heartbeats."""

import pytest

from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.workers.liveness import (
    LivenessLimits,
    LivenessVerdict,
    OwnLag,
    ignores_message,
    judge,
    step_allowance_s,
)
from mlx_dp.proto.messages.events import Heartbeat, WorkerPhase

LIMITS = LivenessLimits()


def heartbeat(
    *, step: int = 0, running: int = 0, step_tokens: int = 0, token_s: float | None = None
) -> Heartbeat:
    return Heartbeat(
        phase=WorkerPhase.SERVING,
        step=step,
        running=running,
        prefilling=0,
        used_tokens=0,
        reserved_tokens=0,
        auxiliary_used=0,
        rss_nbytes=0,
        device_nbytes=0,
        step_tokens=step_tokens,
        prefill_token_s=token_s,
    )


def heartbeats() -> Heartbeats:
    return Heartbeats(heard_at=0.0, progressed_at=0.0)


def verdict(heartbeats: Heartbeats, now: float) -> LivenessVerdict:
    step_s = step_allowance_s(
        LIMITS,
        step_tokens=heartbeats.step_tokens,
        prefill_token_s=heartbeats.prefill_token_s,
        idle_before_step_s=heartbeats.idle_before_step_s,
    )
    return judge(heartbeats, LIMITS, step_s=step_s, now=now)


def test_an_idle_worker_with_heartbeats_lives_for_ever() -> None:
    received = heartbeats()
    for second in range(100):
        received.note_heartbeat(heartbeat(), float(second))
    assert verdict(received, 99.5) is LivenessVerdict.ALIVE


def test_four_missed_heartbeats_are_overdue_and_the_time_out_is_silence() -> None:
    assert verdict(heartbeats(), 2.0) is LivenessVerdict.ALIVE
    assert verdict(heartbeats(), 2.1) is LivenessVerdict.OVERDUE
    assert verdict(heartbeats(), 10.0) is LivenessVerdict.OVERDUE
    assert verdict(heartbeats(), 10.1) is LivenessVerdict.SILENT


@pytest.mark.parametrize(
    ("step_tokens", "token_s", "step_s"),
    [
        pytest.param(0, None, 0.0, id="no prompt"),
        pytest.param(32, None, 3.2, id="not measured yet: 10 tokens per second"),
        pytest.param(512, None, 51.2, id="a whole chunk, not measured yet"),
        pytest.param(4096, None, 120.0, id="a guess has an upper bound"),
        pytest.param(1000, 0.001, 8.0, id="measured: 8 times as long"),
        pytest.param(0, 0.001, 0.0, id="measured, and no prompt"),
        pytest.param(512, 0.2, 300.0, id="a measured step has one too"),
    ],
)
def test_a_step_may_take_longer_by_its_prompt_tokens(
    step_tokens: int, token_s: float | None, step_s: float
) -> None:
    prefilling = heartbeats()
    prefilling.note_heartbeat(heartbeat(running=1, step_tokens=step_tokens, token_s=token_s), 0.0)
    assert verdict(prefilling, 2.0) is LivenessVerdict.ALIVE
    if step_s:
        assert verdict(prefilling, 1.9 + step_s) is LivenessVerdict.SUSPICIOUS
    assert verdict(prefilling, 2.1 + step_s) is LivenessVerdict.OVERDUE
    assert verdict(prefilling, 9.9 + step_s) is LivenessVerdict.OVERDUE
    assert verdict(prefilling, 10.1 + step_s) is LivenessVerdict.SILENT


def test_the_next_heartbeat_ends_the_extra_time() -> None:
    prefilled = heartbeats()
    prefilled.note_heartbeat(heartbeat(running=1, step_tokens=512), 0.0)
    prefilled.note_heartbeat(heartbeat(step=1, running=1), 50.0)
    assert verdict(prefilled, 60.1) is LivenessVerdict.SILENT


def test_heartbeats_without_a_step_while_requests_run_are_a_hang() -> None:
    stuck = heartbeats()
    for second in range(15):
        stuck.note_heartbeat(heartbeat(step=5, running=1), float(second))
    assert verdict(stuck, 2.0) is LivenessVerdict.ALIVE
    assert verdict(stuck, 10.0) is LivenessVerdict.OVERDUE
    assert verdict(stuck, 10.1) is LivenessVerdict.HUNG


def test_each_step_is_progress() -> None:
    stepping = heartbeats()
    for second in range(60):
        stepping.note_heartbeat(heartbeat(step=second // 9, running=1), float(second))
        assert verdict(stepping, second + 0.5) is not LivenessVerdict.HUNG
    assert verdict(stepping, 55.0) is LivenessVerdict.ALIVE


def test_the_time_before_there_was_anything_to_do_does_not_count() -> None:
    waking = heartbeats()
    for second in range(60):
        waking.note_heartbeat(heartbeat(), float(second))
    waking.note_heartbeat(heartbeat(running=1), 60.0)
    assert verdict(waking, 61.0) is LivenessVerdict.ALIVE


def test_tokens_are_progress_before_the_next_heartbeat() -> None:
    talking = heartbeats()
    talking.note_heartbeat(heartbeat(step=1, running=1), 0.0)
    talking.note_tokens(9.0)
    assert verdict(talking, 18.9) is not LivenessVerdict.HUNG


def waking(*, idle_s: float, step: int = 7) -> Heartbeats:
    """A worker with a known pace whose request begins at 1,000 s, after this long without one."""
    rested = heartbeats()
    rested.note_heartbeat(heartbeat(step=step, running=1, token_s=0.001), 900.0 - idle_s)
    rested.note_heartbeat(heartbeat(step=step, token_s=0.001), 1_000.0 - idle_s)
    rested.note_heartbeat(heartbeat(step=step, token_s=0.001), 999.0)
    rested.note_heartbeat(heartbeat(step=step, running=1, step_tokens=20, token_s=0.001), 1_000.0)
    return rested


def test_the_first_step_after_an_idle_minute_may_take_as_long_as_the_first_of_all() -> None:
    rested = waking(idle_s=60.0)
    # Ten seconds for any step, two for its tokens before any pace was known, and thirty.
    assert verdict(rested, 1_041.9) is LivenessVerdict.OVERDUE
    assert verdict(rested, 1_042.1) is LivenessVerdict.SILENT


def test_without_an_idle_minute_it_may_not() -> None:
    assert verdict(waking(idle_s=59.0), 1_010.1) is LivenessVerdict.OVERDUE
    assert verdict(waking(idle_s=59.0), 1_010.3) is LivenessVerdict.SILENT


def test_the_first_step_is_over_when_the_one_after_it_was_launched_too() -> None:
    rested = waking(idle_s=300.0)
    rested.note_heartbeat(heartbeat(step=8, running=1, token_s=0.001), 1_010.0)
    assert verdict(rested, 1_049.9) is LivenessVerdict.OVERDUE
    rested.note_heartbeat(heartbeat(step=9, running=1, token_s=0.001), 1_049.9)
    assert verdict(rested, 1_060.0) is LivenessVerdict.SILENT


def test_its_tokens_are_the_end_of_the_first_step() -> None:
    rested = waking(idle_s=300.0)
    rested.note_tokens(1_030.0)
    assert verdict(rested, 1_040.3) is LivenessVerdict.SILENT


def test_heartbeats_without_a_step_are_no_hang_while_the_first_step_may_last() -> None:
    rested = waking(idle_s=300.0)
    for second in range(1, 41):
        rested.note_heartbeat(heartbeat(step=7, running=1, token_s=0.001), 1_000.0 + second)
        assert verdict(rested, 1_000.0 + second) is not LivenessVerdict.HUNG
    assert verdict(rested, 1_041.0) is LivenessVerdict.HUNG


def test_a_message_is_overdue_only_once_the_loop_has_run_since() -> None:
    received = heartbeats()
    received.num_received = 7
    assert not ignores_message(received, since=0.0, heartbeats_before=7, timeout_s=10.0, now=60.0)
    # Both heartbeats of one loop run, which may have read its messages before this one was
    # sent.
    received.num_received = 9
    assert not ignores_message(received, since=0.0, heartbeats_before=7, timeout_s=10.0, now=60.0)
    received.num_received = 10
    assert ignores_message(received, since=0.0, heartbeats_before=7, timeout_s=10.0, now=60.0)
    assert not ignores_message(received, since=0.0, heartbeats_before=7, timeout_s=10.0, now=10.0)


@pytest.mark.parametrize(("late_s", "missed_s"), [(0.0, 0.0), (0.9, 0.0), (60.0, 60.0)])
def test_own_lag_beyond_the_tolerance_is_sleep(late_s: float, missed_s: float) -> None:
    lag = OwnLag(tolerance_s=1.0)
    assert lag.note_call(0.0, 0.1) == 0.0
    assert lag.note_call(0.1 + late_s, 0.1) == pytest.approx(missed_s)
    assert lag.note_call(0.2 + late_s, 0.1) == 0.0
