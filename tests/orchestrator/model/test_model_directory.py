"""Faults of a model directory are reported with the file and a remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_dp.orchestrator.model.model_directory import ModelSourceError, check_model_dir

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (path / name).touch()
    return path


def remove(*names: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return change


def write(name: str, content: bytes | str, *without: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        remove(*without)(path)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def index_of(*names: str) -> str:
    return json.dumps({"weight_map": {f"layer.{name}": name for name in names}})


def config_as_directory(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").mkdir()


def hub_cache(path: Path) -> None:
    remove("config.json")(path)
    (path / "snapshots").mkdir()


def dangling_weights(path: Path) -> None:
    remove("model.safetensors")(path)
    (path / "model.safetensors").symlink_to("blobs/gone")


FAULTS = {
    "weights that are a link to nothing": (
        dangling_weights,
        r"model\.safetensors is a link to blobs/gone, which does not exist: copy or download",
    ),
    "a config without a type": (
        write("config.json", "{}"),
        r"config\.json has no model_type.*: copy it again",
    ),
    "a config that is no text": (
        write("config.json", b"\xff{"),
        r"config\.json is not valid JSON .*: copy it again",
    ),
    "a config with a mark in front": (
        write("config.json", b'\xef\xbb\xbf{"model_type": "llama"}'),
        r"config\.json is not valid JSON .*BOM",
    ),
    "a config that is a directory": (config_as_directory, r"config\.json cannot be read"),
    "no config": (remove("config.json"), r"has no config\.json.*: name a directory with"),
    "an adapter": (
        write("adapter_config.json", "{}", "config.json"),
        r"holds an adapter, not a model: fuse it with its model by mlx_lm\.fuse",
    ),
    "an image model": (write("model_index.json", "{}", "config.json"), "holds an image model"),
    "the hub's cache": (hub_cache, "is the hub's cache of a model: use --model model"),
    "no tokenizer": (
        remove("tokenizer.json"),
        r"has no tokenizer \(tokenizer\.json or tokenizer\.model\): copy its files",
    ),
    "no weights": (remove("model.safetensors"), "has no weights .*: copy or download them too"),
    "weights of PyTorch": (
        write("pytorch_model.bin", "", "model.safetensors"),
        r"only pytorch_model\.bin: convert it with mlx_lm\.convert --hf-path",
    ),
    "weights of another name": (
        write("consolidated.safetensors", "", "model.safetensors"),
        r"only consolidated\.safetensors: give its files the names",
    ),
    "an index of files that are not there": (
        write(INDEX, index_of("model.safetensors", "model-2.safetensors")),
        r"index\.json names 2 files .*missing: model-2\.safetensors\): copy or download the rest",
    ),
    "an index that is no JSON": (write(INDEX, "{"), r"index\.json is not valid JSON"),
    "defaults that are no text": (
        write("generation_config.json", b"\xff"),
        r"generation_config\.json is not valid JSON",
    ),
    "settings of the tokenizer that are a list": (
        write("tokenizer_config.json", "[]"),
        r"tokenizer_config\.json is not a JSON object",
    ),
}


@pytest.mark.parametrize(("change", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_one_sentence_with_file_and_remedy(model: Path, change, said: str) -> None:
    change(model)
    with pytest.raises(ModelSourceError, match=said) as refused:
        check_model_dir(model)
    assert "\n" not in str(refused.value)
    assert str(model) in str(refused.value)


def test_a_whole_directory_is_taken(model: Path) -> None:
    check_model_dir(model)
    (model / INDEX).write_text(index_of("model.safetensors"))
    check_model_dir(model)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "qwen.tiktoken"])
def test_every_kind_of_tokenizer_counts_as_one(model: Path, name: str) -> None:
    (model / "tokenizer.json").rename(model / name)
    check_model_dir(model)
