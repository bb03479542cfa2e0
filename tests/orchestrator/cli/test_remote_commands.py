"""``mlx-dp keys`` and the refusals of ``mlx-dp worker``."""

import sys
from pathlib import Path

import pytest

from mlx_dp.orchestrator.cli import commands as cli
from mlx_dp.proto.wire.key_files import write_keys


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-dp", *arguments])
        monkeypatch.setattr(cli, "_on_stop_signals", lambda act: None)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("MLX_RANK", raising=False)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_keys_says_what_it_made_and_what_to_copy_where(run, tmp_path: Path) -> None:
    code, out, _ = run("keys", "--dir", str(tmp_path), "--name", "mac2", "--name", "mac3")
    assert code == 0
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == [
        f"{name}.{end}" for name in ("controller", "mac2", "mac3") for end in ("key", "pub")
    ]
    assert "copy controller.pub and mac2.key or mac3.key" in out
    for path in tmp_path.glob("*.key"):
        assert path.read_text().strip() not in out


def test_keys_overwrites_nothing(run, tmp_path: Path) -> None:
    write_keys(tmp_path, ["worker"])
    code, _, err = run("keys", "--dir", str(tmp_path))
    assert code == 2
    assert "worker.key exists" in err


def test_a_worker_needs_a_rank(run) -> None:
    code, _, err = run("worker", "--controller", "tcp://127.0.0.1:1")
    assert code == 2
    assert "--rank" in err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--controller", "127.0.0.1:1"), "use tcp://host:port"),
        (("--controller", "tcp://127.0.0.1:1", "--log-level", "loud"), "'loud' is unknown"),
        (("--controller", "tcp://127.0.0.1"), "use tcp://host:port"),
        (("--controller", "tcp://10.0.0.1:1"), "which requires keys"),
        (("--controller", "tcp://127.0.0.1:1", "--keys", "nowhere"), "holds none"),
        (("--controller", "tcp://127.0.0.1:0"), "is not an address"),
        (("--controller", "tcp://127.0.0.1:99999"), "is not an address"),
        (
            ("--controller", "tcp://127.0.0.1:1", "--model", "nowhere"),
            "is not a directory on this machine",
        ),
        (("--controller", "tcp://127.0.0.1:1", "--mem-fraction-static", "0"), "is out of range"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(run, arguments, found) -> None:
    code, out, err = run("worker", "--rank", "1", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mlx-dp: error: ")
    assert err.count("\n") == 1
    assert found in err


def test_plan_refuses_what_serve_would(run) -> None:
    code, _, err = run("plan", "--engine", "fake", "--dp-size", "2", "--remote-workers", "1")
    assert code == 2
    assert "--dist-init-addr" in err
