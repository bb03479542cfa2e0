"""Checks that a directory holds a servable model, by file names and small files.

Each error names the file, and where to get a missing one.
"""

import json
from pathlib import Path
from typing import Any, Final

from mlx_dp.proto.errors import ConfigError

_INDEX: Final = "model.safetensors.index.json"
_READ_BY_US: Final = ("generation_config.json", "tokenizer_config.json", _INDEX)
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.npz", "*.onnx")
_AGAIN: Final = "copy it again from the model's source"


class ModelSourceError(ConfigError):
    """The model that ``--model`` names is missing or unusable; nothing was loaded."""


def check_model_dir(path: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a directory that mlx-lm cannot load, or whose code it would run without permission."""
    if not (path / "config.json").exists():
        raise ModelSourceError(_without_config(path))
    config = read_object(path / "config.json")
    # auto_map is only for transformers' model classes, which are never loaded here.
    if config.get("model_file") is not None and not trust_remote_code:
        raise ModelSourceError(
            f"the model in {path} needs its own code (model_file in config.json), "
            "which mlx-dp runs only with --trust-remote-code: read that code first"
        )
    if not isinstance(config.get("model_type"), str) and config.get("model_file") is None:
        raise ModelSourceError(
            f"{path / 'config.json'} has no model_type, which is required to build the model: "
            f"{_AGAIN}"
        )
    for name in _READ_BY_US:
        if (path / name).exists():
            read_object(path / name)
    _check_weights(path)
    if not any((path / name).exists() for name in _TOKENIZERS) and not any(path.glob("*.tiktoken")):
        raise ModelSourceError(
            f"the directory {path} has no tokenizer (tokenizer.json or tokenizer.model): copy its "
            "files from the model's source"
        )


def only_gguf(path: Path) -> Path | None:
    """Return the single GGUF file of a directory that is not a model directory, or None.

    Raises ModelSourceError when there are several.
    """
    found = sorted(path.glob("*.gguf"))
    if not found or (path / "config.json").exists():
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise ModelSourceError(
            f"the directory {path} holds {len(found)} .gguf files ({names}): name the one to "
            f"serve, as in --model {found[0]}"
        )
    return found[0]


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelSourceError, which names the file."""
    try:
        # As UTF-8, like mlx-lm.
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        cause = error.strerror or str(error)
        raise ModelSourceError(
            f"{file} cannot be read ({cause}): it must be a file, and readable for this user"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelSourceError(f"{file} is not valid JSON ({error}): {_AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{file} is not a JSON object: {_AGAIN}")
    return value


def _without_config(path: Path) -> str:
    if (path / "adapter_config.json").exists():
        return (
            f"the directory {path} holds an adapter, not a model: fuse it with its model by "
            "mlx_lm.fuse, and name the result"
        )
    if (path / "snapshots").is_dir():
        name = path.name.removeprefix("models--").replace("--", "/")
        return f"the directory {path} is the hub's cache of a model: use --model {name}"
    if (path / "model_index.json").exists():
        return f"the directory {path} holds an image model: mlx-dp serves language models"
    return (
        f"the directory {path} has no config.json, so it is not an mlx-lm model: name a directory "
        "with config.json, model*.safetensors and a tokenizer"
    )


def _check_weights(path: Path) -> None:
    if not any(path.glob("model*.safetensors")):
        raise ModelSourceError(_without_weights(path))
    for file in sorted(path.glob("model*.safetensors")):
        if not file.exists():
            raise ModelSourceError(
                f"{file} is a link to {file.readlink()}, which does not exist: copy or download "
                "the file again"
            )
    index = path / _INDEX
    if not index.exists():
        return
    named = read_object(index).get("weight_map")
    files = sorted({str(file) for file in named.values()}) if isinstance(named, dict) else []
    missing = [file for file in files if not (path / file).exists()]
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelSourceError(
            f"{index} names {len(files)} files of weights, not all of "
            f"which exist (missing: {names}): copy or download the rest"
        )


def _without_weights(path: Path) -> str:
    said = f"the directory {path} has no weights (model*.safetensors)"
    others = [file.name for kind in _OTHER_WEIGHTS for file in sorted(path.glob(kind))]
    if others:
        return (
            f"{said}, only {others[0]}: convert it with mlx_lm.convert --hf-path {path} "
            "--mlx-path NEW, and name NEW"
        )
    named = sorted(file.name for file in path.glob("*.safetensors"))
    if named:
        return f"{said}, only {named[0]}: give its files the names model*.safetensors"
    return f"{said}: copy or download them too"
