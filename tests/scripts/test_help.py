"""Every command that people run has a --help."""

import runpy
import sys
from typing import Final

import pytest

from tests.support.hosts.script_modules import SCRIPTS

COMMANDS: Final = {
    "bench": "benchmarks",
    "chaos": "faults",
    "mac-check": "mac_check",
    "measure": "measuring",
    "soak": "soaking",
}
BENCHMARKS: Final = ("serve", "control", "engine", "batch", "dp-attention", "templates")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_explain_themselves(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"scripts.{COMMANDS[command]}"
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        # In this process, since most of them import a device library.
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: scripts/{command} ")
    assert f"  scripts/{command}" in told.partition("examples:\n")[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_explains_itself(name: str, load, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        load("benchmarks.__main__").main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: scripts/bench {name} ")


def test_every_benchmark_is_tried(load) -> None:
    assert tuple(load("benchmarks.__main__").BENCHMARKS) == BENCHMARKS


def test_an_unknown_benchmark_is_refused_with_the_known_ones(load, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        load("benchmarks.__main__").main(["speed"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'speed'" in said
    assert all(name in said for name in BENCHMARKS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_its_package(command: str) -> None:
    last = (SCRIPTS / command).read_text().splitlines()[-1]
    assert last == f'run_package {COMMANDS[command]} "$@"'
    assert (SCRIPTS / COMMANDS[command] / "__main__.py").is_file()


def test_only_commands_lie_beside_the_packages() -> None:
    files = {path.name for path in SCRIPTS.iterdir() if path.is_file()}
    assert files == {*COMMANDS, "check", "serve", "setup-venv", "test"}
