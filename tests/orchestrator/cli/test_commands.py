"""The command line itself: texts, statuses and shared flags."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
import pytest

from mlx_dp.orchestrator.cli import commands as cli


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


@pytest.mark.usefixtures("low_descriptor_limit")
def test_a_limit_on_open_files_that_mlx_lm_does_not_bear_is_refused_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "plan", "--model", "/nonexistent/model")
    assert (code, out) == (2, "")
    assert err.startswith(
        "mlx-dp: error: the hard limit on open files is 1024, and mlx-lm needs 4096: "
    )
    code, _, _ = run(monkeypatch, capsys, "plan", "--engine", "fake")
    assert code == 0, "the fake engine does not import it"


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


def test_the_hang_timeout_is_a_documented_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "serve", "--help")
    assert code == 0
    words = re.sub(r"[\s│]+", " ", out)
    assert "Seconds without progress" in words.split("--hang-timeout", 1)[1][:200]


def test_the_version_is_the_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "--version")
    assert (code, out) == (0, "mlx-dp 0.1.0\n")


PREPARES = """
import sys, time
from mlx_dp.orchestrator.cli import commands, serve

wait_s = float(sys.argv.pop())

def prepare(flags, environment):
    try:
        print("key", flags.http.api_key, environment.get("MLX_DP_API_KEY"), flush=True)
        time.sleep(60)
    finally:
        print("leaving", flush=True)
        time.sleep(wait_s)

serve.serve = prepare
sys.argv.append("serve")
commands.main()
"""


@contextmanager
def preparing(wait_s: float) -> Iterator[subprocess.Popen[str]]:
    """A start that prepares for ever, and takes a while to end."""
    command = [sys.executable, "-c", PREPARES, str(wait_s)]
    environment = {**os.environ, "MLX_DP_API_KEY": "secret"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "key secret None\n", "children would inherit it"
            yield process
        finally:
            process.kill()


@pytest.mark.system
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_preparation(number: signal.Signals, status: int) -> None:
    with preparing(0.0) as process:
        process.send_signal(number)
        assert process.wait(200.0) == status


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_the_preparation(number: signal.Signals) -> None:
    with preparing(60.0) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(number)
        assert process.wait(200.0) == 128 + number


def test_a_cache_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(blocked))
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    code, _, err = run(monkeypatch, capsys, "plan", "--model", str(gguf))
    assert code == 2
    assert err.startswith("mlx-dp: error: the model cannot be prepared: ")
    assert f"the cache {blocked} writable" in err
