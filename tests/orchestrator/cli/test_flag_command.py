"""Repeated values of one flag, and paths."""

from pathlib import Path

import pytest

from mlx_dp.orchestrator.cli.flag_command import expand_home, spread_values
from mlx_dp.proto.errors import ConfigError

FLAG = "--name"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("serve --name a", "serve --name a"),
        ("serve --name a b c", "serve --name a --name b --name c"),
        ("serve --name a --name b", "serve --name a --name b"),
        (
            "serve --name a b --port 9 --name c d",
            "serve --name a --name b --port 9 --name c --name d",
        ),
        ("serve --name=a b", "serve --name=a --name b"),
        ("serve --port 9 --host x", "serve --port 9 --host x"),
        ("serve --names a b", "serve --names a b"),
        ("serve --name --port 9", "serve --name --port 9"),
        ("", ""),
    ],
)
def test_a_flag_takes_what_follows_up_to_the_next_one(given: str, read: str) -> None:
    assert spread_values(given.split(), FLAG) == read.split()


def test_a_tilde_that_the_shell_left_alone_is_the_home_directory(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home(Path("~/keys")) == tmp_path / "keys"
    assert expand_home(Path("a/~b")) == Path("a/~b")
    assert expand_home("~/text") == "~/text"
    assert expand_home(None) is None


def test_the_home_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="~nobody-here/keys names no home directory"):
        expand_home(Path("~nobody-here/keys"))
