"""Rows of single workers, and faults from within a worker: their effects and conclusions."""

import asyncio
import dataclasses
import importlib.util
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.hosts.script_modules import SCRIPTS


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "chaos_hook", SCRIPTS / "faults/service/hook/sitecustomize.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The timers that were set, none of which runs."""
    found: list[float] = []
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(signal, "setitimer", lambda _which, seconds: found.append(seconds))
    yield found
    signal.signal(signal.SIGALRM, before)


def pause() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    assert callable(handler)
    handler(signal.SIGALRM, None)


def test_a_slow_worker_pauses_over_and_over(hook, timers, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(hook.time, "sleep", slept.append)
    hook._slow(20)
    pause()
    assert slept == [pytest.approx(19 * hook.SLOW_TURN_S)]
    assert timers[-1] == hook.SLOW_TURN_S


def test_a_slow_worker_recovers_when_told_so_in_the_middle_of_a_pause(hook, timers, monkeypatch):
    monkeypatch.setattr(hook.time, "sleep", lambda _seconds: hook._slow(1))
    hook._slow(20)
    pause()
    assert timers[-1] == 0.0
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN


@pytest.fixture
def stage(load) -> Any:
    result = load("faults.verdicts.verdict").RowResult("F3", "killed")
    return SimpleNamespace(result=result, workers=lambda: range(3), settings=None)


def seen_of(load, **more: Any) -> Any:
    client = load("faults.service.client")
    seen = client.Seen(client.Ask(prompt="p"))
    for name, value in more.items():
        setattr(seen, name, value)
    return seen


def grown(**more: int) -> Counter[str]:
    counters = {
        "requests_replayed_total": 0,
        'grants_total{routing_reason="total_tokens"}': 1,
        'grants_total{routing_reason="explicit_rank"}': 2,
        'owner_generation_tokens_total{dp_rank="0"}': 30,
        "duplicate_chunks_total": 0,
    }
    return Counter({**counters, **more})


def test_a_complete_answer_may_neither_be_replayed_nor_granted_again(load, stage):
    rows = load("faults.rows.moment")
    asked = [seen_of(load, usage=(5, 10)) for _ in range(3)]
    rows._check(stage, rows.COMPLETE, asked, grown())
    assert stage.result.violations == []
    rows._check(stage, rows.COMPLETE, asked, grown(requests_replayed_total=1))
    rows._check(stage, "die-in-prefill", asked, grown(requests_replayed_total=1))
    assert len(stage.result.violations) == 2
    assert "requests_replayed_total grew by 1" in stage.result.violations[0]
    assert "grants_total grew by 3 in place of 4" in stage.result.violations[1]


@pytest.mark.parametrize("wrong", ["duplicate_chunks_total", "owner_generation_tokens_total"])
def test_tokens_that_were_computed_twice_are_violations(load, stage, wrong):
    rows = load("faults.rows.moment")
    rows._check(stage, rows.COMPLETE, [seen_of(load, usage=(5, 10))] * 3, grown(**{wrong: 1}))
    assert len(stage.result.violations) == 1
    assert wrong in stage.result.violations[0]


@pytest.mark.parametrize(("slow", "violations"), [(0, 0), (1, 0), (2, 1), (5, 1)])
def test_a_slow_worker_gets_less_than_its_peers_do_on_average(load, stage, slow, violations):
    stage.settings = SimpleNamespace(workers=3, trials=2)
    rows = load("faults.rows.stuck")
    stage.result.trials = 1
    rows._check_shift(stage, 2, [seen_of(load, owner=at) for at in [0, *([2] * slow)]])
    assert not stage.result.violations, "one trial says little"
    stage.result.trials = 2
    rows._check_shift(stage, 1, [seen_of(load, owner=at) for at in [0, 2, 2]])
    assert len(stage.result.violations) == violations


def test_the_pace_is_of_all_streams_and_between_two_times(load):
    pace = load("faults.rows.stuck")._pace
    fast = seen_of(load, chunks_s=[0.0, 1.0, 1.1, 1.2, 9.0])
    slow = seen_of(load, chunks_s=[1.0, 1.8])
    assert pace([fast], 0.5, 2.0) == pytest.approx(10.0)
    assert pace([fast, slow], 0.5, 2.0) == pytest.approx(3.0)
    assert pace([], 0.5, 2.0) == 0.0


@pytest.mark.parametrize(("resumed", "kills"), [([1], 1), ([0, 0, 2], 3)])
def test_a_kill_that_hits_no_stream_before_its_last_token_is_repeated(
    load, stage, monkeypatch, resumed, kills
):
    losses, death = losses_of(load, monkeypatch, resumed)
    asyncio.run(death.streaming_kill(stage))
    assert len(losses) == len(resumed) - kills
    assert stage.result.violations == []


def test_kills_that_never_hit_a_stream_are_a_violation(load, stage, monkeypatch):
    losses, death = losses_of(load, monkeypatch, [0] * load("faults.rows.death").KILLS)
    asyncio.run(death.streaming_kill(stage))
    assert not losses
    assert stage.result.violations == ["F3, trial 0: no stream resumed after 5 kills"]


def losses_of(load, monkeypatch, resumed) -> tuple[list[int], ModuleType]:
    """Kills that do nothing, after each of which this many streams resumed."""
    death = load("faults.rows.death")
    left = list(resumed)

    async def lose(*_given):
        return SimpleNamespace(resumed=left.pop(0))

    async def victim(_stage):
        return 0

    monkeypatch.setattr(death, "lose", lose)
    monkeypatch.setattr(death, "victim", victim)
    return left, death


def test_a_worker_runs_out_of_memory_where_the_system_sets_no_limit_too() -> None:
    script = (
        "import resource, runpy, sys\n"
        "def refuse(*_): raise ValueError('current limit exceeds maximum limit')\n"
        "resource.setrlimit = refuse\n"
        "runpy.run_path(sys.argv[1])['_fill_memory']()\n"
    )
    hook = SCRIPTS / "faults/service/hook/sitecustomize.py"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(hook)], capture_output=True, text=True
    )
    assert ended.stderr.splitlines()[-1].startswith("MemoryError: the system allocated ")


@pytest.mark.parametrize("possible", [True, False])
def test_rows_that_this_system_does_not_allow_are_left_out(load, monkeypatch, possible) -> None:
    run = load("faults.__main__")
    row = dataclasses.replace(run.ROWS["F24"], possible=possible)
    monkeypatch.setitem(run.ROWS, "F24", row)
    chosen = run.chosen(run.parse(["--rows", "F1", "F24"]))
    assert [row.name for row in chosen] == (["F1", "F24"] if possible else ["F1"])
