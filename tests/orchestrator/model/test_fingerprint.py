import json
import shutil
from pathlib import Path

import pytest

from mlx_dp.orchestrator.model.fingerprint import model_fingerprint
from mlx_dp.proto.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    write_weights(directory / "model.safetensors", "a")
    return directory


def write_weights(path: Path, name: str, *, data: bytes = b"\0\0\0\0") -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_copy_elsewhere_is_the_same_model(model, tmp_path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "README.md").write_text("not what makes it this model")
    assert model_fingerprint(copy) == model_fingerprint(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"model_type": "gemma"}'),
        lambda model: write_weights(model / "model.safetensors", "b"),
        lambda model: write_weights(model / "model.safetensors", "a", data=b"\0" * 8),
        lambda model: write_weights(model / "more.safetensors", "a"),
        lambda model: (model / "modeling.py").write_text("pass"),
        lambda model: (model / "model.safetensors").rename(model / "other.safetensors"),
    ],
    ids=["configuration", "tensors", "size", "file", "code", "name"],
)
def test_another_model_is_told_apart(model, change) -> None:
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_a_model_is_named(model, missing) -> None:
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=f"no model can be read from {model}"):
        model_fingerprint(model)


def test_a_header_that_claims_to_be_endless_is_read_no_further_than_the_file(model) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    assert model_fingerprint(model)
