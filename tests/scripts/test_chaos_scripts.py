"""Conclusions that scripts/chaos and the measures draw from their observations."""

import asyncio
import dataclasses
import json
import logging
import os
import random
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.support.hosts.script_modules import SCRIPTS
from tests.support.simulated_runs import replay


@pytest.fixture
def result(load):
    return load("faults.verdicts.verdict").RowResult("F2", "killed")


@pytest.fixture
def expected(load):
    """The expected response of ``seen_of``."""
    return load("faults.verdicts.verdict").Expected(
        texts=("abc",), finish_reasons=("length",), usage=(1, 3)
    )


def seen_of(load, text: str = "abc", **more: Any) -> Any:
    """A flawless stream of this text, with the given differences."""
    client = load("faults.service.client")
    seen = client.Seen(client.Ask(prompt="p", max_tokens=3), status=200, done=1, ids={"x"})
    seen.texts[0] = text
    seen.finish_reasons.append("length")
    seen.usage = (1, len(text))
    for name, value in more.items():
        setattr(seen, name, value)
    return seen


@pytest.mark.parametrize(
    ("got", "lost", "repeated", "wrong"),
    [
        ("brown fox jumps", 0, 0, 0),
        ("brown jumps", 4, 0, 0),
        ("brown fox ju", 3, 0, 0),
        ("wn fox jumps", 3, 0, 0),
        ("brown fox fox jumps", 0, 4, 0),
        ("brown fox jumpss", 0, 1, 0),
        ("bbrown fox jumps", 0, 1, 0),
        ("brown cat jumps", 0, 0, 9),
        ("", 15, 0, 0),
        ("brown dog", 0, 0, 9),
    ],
)
def test_lost_repeated_and_wrong_text_are_told_apart(load, got, lost, repeated, wrong):
    found = load("faults.verdicts.verdict").compare("brown fox jumps", got)
    assert (found.lost, found.repeated, found.wrong) == (lost, repeated, wrong)


def test_a_flawless_stream_is_counted_and_no_more(load, result, expected):
    result.take(seen_of(load), expected)
    assert (result.requests, result.violations) == (1, [])


def test_lost_and_repeated_tokens_are_violations(load, result, expected):
    result.take(seen_of(load, text="ac", usage=(1, 3)), expected)
    result.take(seen_of(load, text="abbc", usage=(1, 3)), expected)
    assert (result.lost, result.repeated, result.failed) == (1, 1, 0)
    assert len(result.violations) == 2


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ({"error": "worker_lost"}, "failed: worker_lost"),
        ({"done": 0}, "0 [DONE]"),
        ({"done": 2}, "2 [DONE]"),
        ({"after_done": 1}, "events after [DONE]"),
        ({"ids": {"x", "y"}}, "the id changed"),
        ({"roles": 2}, "the role was sent 2 times"),
        ({"finish_reasons": []}, "finish reasons []"),
        ({"finish_reasons": ["stop", "length"]}, "finish reasons"),
        ({"usage": (1, 4)}, "usage (1, 4)"),
        ({"usage": (9, 3)}, "usage (9, 3)"),
    ],
)
def test_a_stream_that_breaks_its_form_is_a_violation(load, result, expected, flaw, words):
    result.take(seen_of(load, **flaw), expected)
    assert len(result.violations) == 1
    assert words in result.violations[0]
    assert result.failed == ("error" in flaw)


def test_log_probabilities_of_other_tokens_are_a_violation(load, result, expected):
    shown = dataclasses.replace(expected, tokens=("abc",))
    seen = seen_of(load)
    seen.tokens[0] = "abbc"
    result.take(seen, shown)
    assert len(result.violations) == 1
    assert "log-probabilities of ('abbc',)" in result.violations[0]
    seen.tokens[0] = "abc"
    result.take(seen, shown)
    assert len(result.violations) == 1


def test_each_answer_is_compared_for_itself(load, result):
    expected = load("faults.verdicts.verdict").Expected(
        texts=("abc", "def"), finish_reasons=("length", "length"), usage=(1, 6)
    )
    seen = seen_of(load, finish_reasons=["length", "length"], usage=(1, 6))
    seen.ask = dataclasses.replace(seen.ask, n=2)
    seen.texts[1] = "df"
    result.take(seen, expected)
    assert (result.requests, result.lost, len(result.violations)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("event", "text", "role"),
    [
        ('{"text": "a"}', "a", 0),
        ('{"delta": {"role": "assistant", "content": ""}}', "", 1),
        ('{"delta": {"role": null, "content": "a"}}', "a", 0),
        ('{"delta": {}, "finish_reason": "stop"}', "", 0),
    ],
)
def test_each_kind_of_event_is_read(load, event, text, role):
    client = load("faults.service.client")
    seen = client.Seen(client.Ask(prompt="p", chat=True))
    client._take(seen, '{"id": "x", "choices": [{"index": 0, ' + event[1:] + "]}")
    assert (seen.text, seen.roles, len(seen.chunks_s)) == (text, role, len(text))


def test_events_after_the_end_are_noticed_in_the_stream(load):
    client = load("faults.service.client")
    seen = client.Seen(client.Ask(prompt="p"))
    event = '{"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": null}]}'
    for data in (event, "[DONE]", event):
        client._take(seen, data)
    assert (seen.done, seen.after_done, seen.text) == (1, 1, "aa")


def test_a_stream_resumes_at_the_end_of_the_pause_that_the_loss_made(load):
    seen = seen_of(load, chunks_s=[1.0, 1.1, 1.21, 1.6, 1.7, 2.9])
    assert seen.resumed_s(1.15, 1.2) == 1.6


def test_a_stream_that_ended_in_time_does_not_resume(load):
    assert seen_of(load, chunks_s=[1.0, 1.1]).resumed_s(1.15, 1.2) is None


def test_a_bound_is_held_to_the_99th_percentile(result):
    result.bound("detection", [0.01] * 99 + [0.2], 0.1)
    assert len(result.violations) == 1
    result.bound("recovery", [0.01] * 100, 0.1)
    assert len(result.violations) == 1


def test_a_bound_without_measurements_is_not_kept(result):
    result.bound("recovery", [], float("inf"))
    assert result.violations == []
    result.bound("recovery", [], 0.1)
    assert result.violations == ["F2: recovery was never measured"]


def test_leftovers_are_counted_and_are_a_violation(result):
    result.leave("processes", 0)
    result.leave("fds", -3)
    assert result.violations == []
    result.leave("files", 2, ["a", "b"])
    assert result.cells()[-2:] == ["0/2/0", "1"]


def test_the_matrix_has_every_column_and_row(load, result):
    lines = load("faults.verdicts.verdict").matrix([result]).splitlines()
    assert len(lines) == 3
    counts = ("trials", "lost", "repeated", "failed", "refused", "violations")
    for word in (*counts, "detected", "recovered"):
        assert word in lines[0]
    assert "F2 killed" in lines[2]


def test_the_fake_responses_are_those_of_the_engine(load):
    oracles = load("faults.verdicts.oracle")
    oracle = oracles.FakeOracle(oracles.random.Random(1), (5, 40))
    ask = oracle.draw()
    [text] = oracle.expected(ask).texts
    assert len(text) == ask.max_tokens
    assert [text] == [*oracle.expected(ask).texts]
    assert [text] != [*oracle.expected(oracles.replace(ask, prompt="other")).texts]


def test_a_fake_answer_ends_at_its_stop_string_and_is_counted_to_its_end(load):
    oracles = load("faults.verdicts.oracle")
    oracle = oracles.FakeOracle(oracles.random.Random(1), (40, 40))
    ask = oracles.replace(oracle.draw(), chat=True)
    whole = oracle.expected(ask)
    assert whole.usage == (len(ask.prompt) + len("user: \nassistant: "), 40)
    assert whole.finish_reasons == ("length",)
    stop = whole.texts[0][10:13]
    at = whole.texts[0].index(stop)
    cut = oracle.expected(oracles.replace(ask, stop=("$$$", stop)))
    assert cut.texts == (whole.texts[0][:at],)
    assert (cut.usage[1], cut.finish_reasons) == (at + 3, ("stop",))


def test_clients_ask_in_all_forms(load):
    oracles = load("faults.verdicts.oracle")
    oracle = oracles.FakeOracle(oracles.random.Random(1), (20, 120))
    asks = [oracle.draw_form() for _ in range(200)]
    for name in ("chat", "stream", "by_openai", "penalised", "stop", "n", "logprobs"):
        assert len({bool(getattr(ask, name)) for ask in asks}) == 2 or name == "n", name
    assert {ask.n for ask in asks} == {1, 2}
    assert all(oracle.expected(ask).usage[0] <= oracles.MOST_PROMPT_TOKENS for ask in asks)


def bystanders_of(load, result, seen: list[Any], losses: list[tuple[float, int]]) -> Any:
    """After a trial that began at 10.0, in which these streams ended."""
    stub = SimpleNamespace(ended=seen, seen={}, wait_for=AsyncMock(return_value=True))
    service = SimpleNamespace(mark=lambda: 0, losses=lambda since: losses)
    found = load("faults.trials.bystanders").Bystanders(service, stub, result, 3)
    found._begun_s = 10.0
    asyncio.run(found.end())
    return found


def test_the_gap_of_a_stream_that_a_loss_did_not_touch_is_held_to_its_bound(load, result):
    stream = {"sent_s": 10.1, "ended_s": 12.0, "chunks_s": [10.2, 10.3, 10.8, 10.9]}
    untouched = seen_of(load, owner=1, **stream)
    hit = seen_of(load, owner=0, **stream)
    later = seen_of(load, owner=1, **{**stream, "chunks_s": [11.0, 11.9]})
    bystanders = bystanders_of(load, result, [untouched, hit, later], [(10.5, 0)])
    assert result.gap_s == [pytest.approx(0.5)]
    result.calm_gap_s = [0.01]
    bystanders.judge(10.0)
    assert result.violations == []
    bystanders.judge(1.0)
    assert result.violations == [
        "F2: gap of untouched streams p99 500 ms, allowed 100 ms",
    ]


def test_a_row_without_any_untouched_stream_is_a_violation(load, result):
    bystanders = bystanders_of(load, result, [], [(10.5, 0)])
    bystanders.judge(1.0)
    assert result.violations == []
    for _ in range(20):
        asyncio.run(bystanders.end())
    bystanders.judge(1.0)
    assert "no stream was seen" in result.violations[0]


def test_every_row_of_the_matrix_is_there_or_simulated(load):
    run = load("faults.__main__")
    numbers = {int(name[1:]) for name in (*run.ROWS, *run.SIMULATED)}
    # F23 was never assigned.
    assert numbers == set(range(1, 30)) - {23}


def test_rows_that_need_fake_engines_are_left_out_with_a_model(load):
    run = load("faults.__main__")
    every = [row.name for row in run.chosen(run.parse([]))]
    assert every == sorted(run.ROWS, key=lambda name: int(name[1:]))
    some = [row.name for row in run.chosen(run.parse(["--mlx", "m", "--rows", "F2", "F19"]))]
    assert some == ["F2"]


def test_a_quick_look_takes_few_trials(load):
    run = load("faults.__main__")
    assert run.settings_of(run.parse(["--quick"])).trials == 3
    assert run.settings_of(run.parse([])).trials == 200


def test_a_model_has_no_rates_and_gets_more_time(load):
    stages, run = load("faults.trials.stage"), load("faults.__main__")
    row = stages.Row(
        name="F3", title="", trial=None, arguments=("--fake-prefill-rate", "9", "--dp-size", "4")
    )

    def arguments(*options: str) -> str:
        return " ".join(stages.Stage(row, run.settings_of(run.parse([*options]))).arguments())

    assert "--engine fake --fake-decode-rate 200" in arguments()
    assert "--hang-timeout 1 " in arguments()
    assert "--fake-prefill-rate 9 --dp-size 4" in arguments()
    assert "fake" not in arguments("--mlx", "m")
    assert "--hang-timeout 3 " in arguments("--mlx", "m")
    assert arguments("--mlx", "m").endswith(" --dp-size 4")


def test_a_row_may_have_the_times_that_the_product_has(load):
    stages, run = load("faults.trials.stage"), load("faults.__main__")
    row = stages.Row(name="F28", title="", trial=None, hang_s=None)
    arguments = stages.Stage(row, run.settings_of(run.parse([]))).arguments()
    assert not {"--hang-timeout", "--heartbeat-interval"} & {*arguments}


@pytest.mark.parametrize("arguments", [["--rows", "F99"], ["--trials", "0"]])
def test_a_row_or_count_that_makes_no_sense_is_refused(load, capsys, arguments):
    with pytest.raises(SystemExit):
        load("faults.__main__").parse(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_a_violation_makes_the_exit_status_1(load, monkeypatch, capsys, result):
    run = load("faults.__main__")

    async def ran(_options):
        return [result]

    monkeypatch.setattr(run, "run", ran)
    assert run.main(["--rows", "F2"]) == 0
    result.violate("a token was lost")
    assert run.main(["--rows", "F2"]) == 1
    assert "violation: F2, trial 0: a token was lost" in capsys.readouterr().out


def test_simulated_rows_are_rows_of_the_matrix_and_of_the_json(load, monkeypatch, capsys, tmp_path):
    run = load("faults.__main__")
    monkeypatch.setattr(run, "simulate", lambda name, seed, runs: [f"{name}, seed {seed}: wrong"])
    found = tmp_path / "found.json"
    arguments = [
        "--rows",
        "F25",
        "--trials",
        "3",
        "--findings",
        str(tmp_path),
        "--json",
        str(found),
    ]
    assert run.main(arguments) == 1
    assert "| F25 the clock jumps, simulated | 30 " in capsys.readouterr().out
    [row] = json.loads(found.read_text())["rows"]
    assert (row["row"], row["violations"]) == ("F25", ["F25, seed 1: wrong"])


def test_a_simulated_run_that_fails_is_a_violation_with_its_seed(load, monkeypatch):
    simulated = load("faults.simulated")

    def run_seed(seed, drawn):
        if (seed, drawn) == (12, "frames"):
            raise AssertionError("a token was lost")

    monkeypatch.setattr(replay, "run_seed", run_seed)
    assert simulated.simulate("F21", 1, 10) == ["F21, seed 12: a token was lost"]


@pytest.mark.parametrize("row", ["F21", "F25", "F29"])
def test_simulated_rows_are_found_and_run(load, row):
    before = logging.getLogger("mlx_dp").level
    assert load("faults.simulated").simulate(row, 1, 1) == []
    assert logging.getLogger("mlx_dp").level == before


def test_each_violation_gets_a_file_with_its_seed_and_the_log(load, tmp_path, capsys):
    settings = load("faults.__main__").settings_of(
        load("faults.__main__").parse(["--seed", "7", "--findings", str(tmp_path / "found")])
    )
    record = settings.record("F2")
    record.write(["F2, trial 1: a token was lost"], ["what it said"])
    record.write(["F2, trial 1: a token was lost", "F2, trial 3: a slot stayed"], ["and then"])
    first, second = sorted((tmp_path / "found").iterdir())
    assert "a token was lost" in first.read_text()
    again = "--rows F2 --seed 7 --trials 200 --workers 3 --streams 6 --slack 1\n"
    assert f"again: scripts/chaos {again}" in first.read_text()
    assert "what it said" in first.read_text()
    assert "a slot stayed" in second.read_text()
    assert "and then" in second.read_text()
    settings.record("F2").write(["again"], [])
    assert len([*(tmp_path / "found").iterdir()]) == 3
    assert capsys.readouterr().err.count("violation: ") == 3
    settings.record("F3").write(["broken"] * 1000, [])
    assert len([*(tmp_path / "found").iterdir()]) == 3 + load("faults.verdicts.record").MOST_FILES


def test_a_measure_that_is_missing_keeps_no_bound(load):
    measured = load("measuring.value").Measured
    assert measured.bounded("x", 1.0, 1.0, str).kept
    assert not measured.bounded("x", 1.1, 1.0, str).kept
    assert not measured.bounded("x", float("nan"), 1.0, str).kept


def test_nonsense_is_named_and_none_of_it_could_be_served(load):
    nonsense = load("faults.service.nonsense")
    found = list(nonsense.malformed_requests(random.Random(1)))
    assert len({name for name, _ in found}) == len(found) > 20


@pytest.mark.system
def test_an_unreaped_child_is_found(load):
    quiet = load("faults.verdicts.quiet")
    service = SimpleNamespace(pid=os.getpid(), alive=list, pids={})
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert quiet._children(service) == (set(), {child.pid})
        assert not asyncio.run(quiet._only_workers(service))
    assert asyncio.run(quiet._only_workers(service))


@pytest.mark.slow
@pytest.mark.system
def test_one_kill_of_a_streaming_worker_is_noticed_by_no_client():
    arguments = ["--rows", "F2", "--trials", "1", "--workers", "2", "--slack", "30"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.faults", *arguments],
        cwd=SCRIPTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| F2 SIGKILL, streaming" in done.stdout


def test_a_port_that_lasts_is_none_that_connections_get(load: Any) -> None:
    ports = load("faults.service.ports")
    with socket.socket() as client:
        client.bind(("127.0.0.1", 0))
        assert client.getsockname()[1] not in ports.LASTING
    assert ports.lasting_port() in ports.LASTING
