"""A truncated weight file is found before any of it is loaded."""

import json
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker import model_probe
from mlx_dp.worker.loading.loaded_model import load
from mlx_dp.worker.loading.weight_files import check_weight_files
from tests.support.models.tiny_models import DENSE

pytestmark = pytest.mark.mlx


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return DENSE["llama"].write(tmp_path) / "model.safetensors"


def cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-nbytes])


def test_a_whole_file_passes(weights: Path) -> None:
    check_weight_files(weights.parent)


@pytest.mark.parametrize("missing", [1, 1024])
def test_a_cut_file_is_named_with_the_bytes_that_it_lacks(weights: Path, missing: int) -> None:
    cut(weights, missing)
    with pytest.raises(ConfigError) as refused:
        load(weights.parent)
    assert str(refused.value) == (
        f"{weights} is incomplete, {missing} bytes are missing at its end: copy or download it "
        "again"
    )


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_a_file_cut_in_its_header_is_incomplete(weights: Path, kept: int) -> None:
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"model\.safetensors is incomplete"):
        check_weight_files(weights.parent)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        (10).to_bytes(8, "little") + b'{"a":null}',
        (8).to_bytes(8, "little") + b'{"a":{}}',
    ],
)
def test_what_is_no_weight_file_is_said_to_be_none(weights: Path, content: bytes) -> None:
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        check_weight_files(weights.parent)


def test_every_part_of_a_model_is_looked_at(weights: Path) -> None:
    part = weights.with_name("model-00002-of-00002.safetensors")
    part.write_bytes(weights.read_bytes())
    cut(part, 7)
    with pytest.raises(ConfigError, match=r"00002\.safetensors is incomplete, 7 bytes"):
        check_weight_files(weights.parent)


def test_the_probe_says_it_as_well(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(weights, 1024)
    assert model_probe.main([str(weights.parent)]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "error": f"{weights} is incomplete, 1024 bytes are missing at its end: copy or download "
        "it again"
    }
