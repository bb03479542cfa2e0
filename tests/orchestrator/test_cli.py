"""The command line itself: texts, statuses and shared flags."""

import inspect
import json
import re
import sys

import pytest

from mlx_dp.orchestrator import cli


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mlx-dp", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_plan_prints_one_line_per_owner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--engine", "fake", "--dp", "4", "--max-running-requests", "8", "--json"]
    code, out, _ = run(monkeypatch, capsys, *command)
    assert code == 0
    assert [owner["request_slots"] for owner in json.loads(out)["owners"]] == [8, 8, 8, 8]


def test_a_refusal_is_one_sentence_and_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--engine", "fake", "--dp", "4", "--enable-dp-attention"]
    code, out, err = run(monkeypatch, capsys, *command, "--max-running-requests", "1")
    assert (code, out) == (2, "")
    assert err == (
        "mlx-dp: error: --max-running-requests 1 leaves 0 request slots per owner "
        "(attn_dp_size=4): use at least 4, or omit the flag\n"
    )


def test_an_unknown_flag_is_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "serve", "--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in err


def test_serve_and_plan_have_the_same_flags() -> None:
    serve = inspect.signature(cli.serve).parameters
    plan = dict(inspect.signature(cli.plan).parameters)
    plan.pop("as_json")
    assert serve.keys() == plan.keys()


def test_every_limit_says_its_unit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "serve", "--help")
    assert code == 0
    words = re.sub(r"[\s│]+", " ", out)
    for flag in ("--max-running-requests", "--max-mamba-cache-size"):
        text = words.split(flag, 1)[1]
        assert "per replica, or for the whole group with --enable-dp-attention" in text[:400]
    assert "per worker in both modes, never divided" in words
    assert "the whole service in both modes" in words
    assert "all workers together" in words


def test_the_version_is_the_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "--version")
    assert (code, out) == (0, "mlx-dp 0.1.0\n")
