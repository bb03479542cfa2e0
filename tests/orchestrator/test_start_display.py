"""What is shown while workers start."""

import io
from dataclasses import replace

from rich.console import Console

from mlx_dp.orchestrator.service import OwnerState, WorkerStatus
from mlx_dp.orchestrator.start_display import LineDisplay, stage_of, start_display
from mlx_dp.proto.ownership import OwnerCapacity

QUEUED = OwnerState(
    owner=0,
    status=WorkerStatus.STARTING,
    pid=None,
    incarnation="",
    restarts=0,
    capacity=None,
    shape=None,
    context_length=None,
    device="",
    running=0,
    prefilling=0,
    used_tokens=0,
    reserved_tokens=0,
    auxiliary_used=0,
    rss_nbytes=0,
    device_nbytes=0,
    step=0,
    generated_tokens_total=0,
    generation_tokens_per_s=0.0,
    phase="",
)
LOADING = replace(QUEUED, pid=1, phase="loading")
WARMING = replace(QUEUED, pid=1, phase="warming")
READY = replace(
    QUEUED,
    pid=1,
    status=WorkerStatus.READY,
    phase="serving",
    capacity=OwnerCapacity(request_slots=8, auxiliary_slots=0, pool_tokens=1000),
)


def test_each_stage_has_its_word() -> None:
    words = [stage_of(state).stage for state in (QUEUED, LOADING, WARMING, READY)]
    assert words == ["queued", "loading", "warming", "ready"]
    assert stage_of(READY).detail == "8 slots, 1,000 KV tokens"
    failed = replace(LOADING, status=WorkerStatus.FAILED, message="no weights")
    assert (stage_of(failed).stage, stage_of(failed).detail) == ("failed", "no weights")


def test_plain_lines_tell_changes_once_and_only_news() -> None:
    output = io.StringIO()
    display = LineDisplay(Console(file=output, width=200))
    second = replace(QUEUED, owner=1)
    for now, states in enumerate(
        [(QUEUED, second), (LOADING, second), (LOADING, second), (READY, replace(LOADING, owner=1))]
    ):
        display.show(states, float(now))
    assert output.getvalue().splitlines() == [
        "owner 0: loading (1.0 s)",
        "owner 0: ready: 8 slots, 1,000 KV tokens (3.0 s)",
        "owner 1: loading (3.0 s)",
    ]


def test_a_pipe_gets_lines_and_a_terminal_a_table() -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    with start_display(Console(file=pipe)) as display:
        display.show((LOADING,), 1.0)
    assert pipe.getvalue() == "owner 0: loading (1.0 s)\n"
    console = Console(file=terminal, force_terminal=True, width=100)
    with start_display(console) as display:
        display.show((LOADING,), 1.0)
        display.show((READY,), 2.0)
    assert "\x1b[" in terminal.getvalue(), "nothing was redrawn"
    assert "8 slots" in terminal.getvalue()
