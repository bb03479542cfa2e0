"""The display while workers start."""

import io
from dataclasses import replace

from rich.console import Console

from mlx_dp.orchestrator.api import WorkerStatus
from mlx_dp.orchestrator.cli.start_display import stage_of, start_display
from tests.support.control.owner_states import LOADING, QUEUED, READY, WARMING


def test_each_stage_has_its_word() -> None:
    words = [stage_of(state).stage for state in (QUEUED, LOADING, WARMING, READY)]
    assert words == ["queued", "loading", "warming", "ready"]
    assert stage_of(READY).detail == "8 slots, 1,000 KV tokens"
    failed = replace(LOADING, status=WorkerStatus.FAILED, message="no weights")
    assert (stage_of(failed).stage, stage_of(failed).detail) == ("failed", "no weights")


def test_a_terminal_gets_a_table_and_a_pipe_only_the_log() -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    with start_display(Console(file=pipe)) as display:
        display.show((LOADING,), 1.0)
    assert pipe.getvalue() == ""
    console = Console(file=terminal, force_terminal=True, width=100)
    with start_display(console) as display:
        display.show((LOADING,), 1.0)
        display.show((READY,), 2.0)
    assert "\x1b[" in terminal.getvalue(), "nothing was redrawn"
    assert "8 slots" in terminal.getvalue()


def test_a_message_is_shown_as_it_is() -> None:
    output = io.StringIO()
    words = "no [/tmp/x] [lm_head]"
    with start_display(Console(file=output, force_terminal=True, width=100)) as display:
        display.show((replace(LOADING, status=WorkerStatus.FAILED, message=words),), 1.0)
    assert words in output.getvalue()


def test_the_table_counts_each_owners_own_seconds() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with start_display(console) as display:
        second = replace(QUEUED, dp_rank=1)
        display.show((LOADING, second), 0.0)
        display.show((READY, second), 2.0)
        display.show((READY, replace(LOADING, dp_rank=1)), 3.0)
        display.show((READY, replace(LOADING, dp_rank=1)), 4.5)
    last = output.getvalue().rpartition("seconds")[2]
    assert "ready    2.0" in last
    assert "loading  1.5" in last
