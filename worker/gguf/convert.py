"""The child process that turns a GGUF file into an mlx-lm model directory.

It prints progress as JSON lines, and an error as one JSON line with one sentence.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.gguf.file import GgufFile
from mlx_dp.worker.gguf.tokenizer import end_token_ids, write_tokenizer
from mlx_dp.worker.gguf.weights import Storage, check_convertible, config_of, convert_weights


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mlx_dp.worker convert")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--dtype", choices=("float32", "4bit"), default="float32")
    arguments = parser.parse_args(argv)
    try:
        convert(arguments.gguf, arguments.destination, arguments.dtype)
    except ConfigError as error:
        _say(error=str(error))
        return 1
    except OSError as error:
        _say(
            error=f"{arguments.gguf} cannot be converted ({error}): it must be readable, and "
            f"{arguments.destination.parent} writable, with room for the converted model"
        )
        return 1
    return 0


def convert(gguf_path: Path, destination: Path, storage: Storage) -> None:
    """Write the model directory under another name, then rename it: it is complete or absent."""
    gguf = GgufFile.read(gguf_path)
    check_convertible(gguf)
    destination.parent.mkdir(parents=True, exist_ok=True)
    unfinished = destination.parent / f".{destination.name}.{os.getpid()}.tmp"
    unfinished.mkdir()
    try:
        _write_model(gguf, unfinished, storage)
        unfinished.rename(destination)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _write_model(gguf: GgufFile, folder: Path, storage: Storage) -> None:
    write_tokenizer(gguf, folder)
    weights = convert_weights(
        gguf, storage, lambda done, total: _say(stage="convert", done=done, total=total)
    )
    config = config_of(gguf, weights)
    generation: dict[str, Any] = {}
    for role, key in (("bos", "bos_token_id"), ("pad", "padding_token_id")):
        if gguf.has(f"tokenizer.ggml.{key}"):
            generation[f"{role}_token_id"] = gguf.integer(f"tokenizer.ggml.{key}")
    generation["eos_token_id"] = end_token_ids(gguf)
    _write_json(folder / "config.json", config | generation)
    _write_json(folder / "generation_config.json", generation)
    _say(stage="write", done=0, total=1)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _say(stage="write", done=1, total=1)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
