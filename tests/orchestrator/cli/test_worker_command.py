"""Checks of a worker host on its own machine, before it starts anything."""

import shutil
from pathlib import Path

import pytest

from mlx_dp.orchestrator.cli.worker_command import HostOptions, LocalMachine
from mlx_dp.orchestrator.model.fingerprint import model_fingerprint
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.host_messages import Launch


def here(model: Path | None = None) -> LocalMachine:
    options = HostOptions(
        controller="tcp://127.0.0.1:1",
        rank=1,
        keys=None,
        model=model,
        mem_fraction_static=0.8,
        log_level="info",
        once=False,
    )
    return LocalMachine(options, {}, lambda line: None)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    directory = tmp_path / "theirs"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    return directory


def launch(model: Path) -> Launch:
    return Launch(
        identity="w1-a",
        model_path=str(model),
        model_fingerprint=model_fingerprint(model),
        log_level="info",
    )


def test_a_machine_without_the_model_is_told_to_give_its_own_directory(theirs) -> None:
    wanted = launch(theirs)
    shutil.rmtree(theirs)
    with pytest.raises(ConfigError, match=f"no model directory {theirs}: .*--model"):
        here().launcher(wanted)


def test_another_model_in_the_place_of_theirs_is_refused(theirs, tmp_path) -> None:
    other = Path(shutil.copytree(theirs, tmp_path / "other"))
    (other / "config.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match=f"{other} is not the one .* serves from {theirs}"):
        here(other).launcher(launch(theirs))


@pytest.mark.usefixtures("low_descriptor_limit")
def test_a_machine_whose_limit_on_open_files_mlx_lm_does_not_bear_is_refused(theirs) -> None:
    with pytest.raises(ConfigError, match="the hard limit on open files is 1024"):
        here().launcher(launch(theirs))


def test_the_fake_engine_needs_no_model() -> None:
    nothing = Launch(identity="w1-a", model_path="", model_fingerprint="", log_level="info")
    assert here().launcher(nothing)
