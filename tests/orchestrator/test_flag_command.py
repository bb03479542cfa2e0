"""Paths given to a command."""

from pathlib import Path

import pytest

from mlx_dp.orchestrator.flag_command import at_home
from mlx_dp.proto.errors import ConfigError


def test_a_tilde_that_the_shell_left_alone_is_the_home_directory(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert at_home(Path("~/keys")) == tmp_path / "keys"
    assert at_home(Path("a/~b")) == Path("a/~b")
    assert at_home("~/text") == "~/text"
    assert at_home(None) is None


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="~nobody-here/keys names no home directory"):
        at_home(Path("~nobody-here/keys"))
