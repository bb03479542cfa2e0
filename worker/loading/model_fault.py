"""Explains mlx-lm's errors about a model that it cannot build, in one sentence with a remedy."""

import importlib.metadata
import re
from pathlib import Path
from typing import Final

_UNKNOWN_TYPE: Final = re.compile(r"Model type (?P<type>\S+) not supported")
_MISSING: Final = re.compile(r"Missing [0-9]+ parameters:\s*(?P<names>.*)", re.DOTALL)
_FOREIGN: Final = re.compile(r"Received [0-9]+ parameters not in model:\s*(?P<names>.*)", re.DOTALL)
_SHAPE: Final = re.compile(
    r"Expected shape (?P<wanted>\(.*?\)) but received shape (?P<given>\(.*?\)) for parameter "
    r"(?P<name>\S+)"
)
_SHOWN: Final = 3
_APART: Final = "config.json and the weights belong to different models, so copy both again"


def describe_fault(directory: Path, error: Exception) -> str:
    """Return what is wrong with the model in a directory. mlx-lm has no error types of its own."""
    text = str(error)
    if found := _UNKNOWN_TYPE.search(text):
        return (
            f"{directory / 'config.json'} says model_type {found['type']!r}, which mlx-lm "
            f"{importlib.metadata.version('mlx-lm')} does not know: it is no language model, or "
            "needs a newer mlx-lm (pip install -U mlx-lm)"
        )
    if found := _MISSING.search(text):
        return (
            f"the weights in {directory} lack tensors that config.json asks for "
            f"({_names(found['names'])}): files are missing or of another model, so copy or "
            "download it again"
        )
    if found := _FOREIGN.search(text):
        return (
            f"the weights in {directory} have tensors that config.json has no place for "
            f"({_names(found['names'])}): {_APART}"
        )
    if found := _SHAPE.search(text):
        return (
            f"the weights in {directory} have {found['name'].rstrip('.')} in shape "
            f"{found['given']}, and config.json asks for {found['wanted']}: {_APART}"
        )
    return (
        f"mlx-lm cannot build the model that {directory / 'config.json'} describes "
        f"({type(error).__name__}: {text}): compare that file with the one where the model came "
        "from"
    )


def _names(listed: str) -> str:
    names = [name.strip(" ,.\n") for name in listed.split("\n") if name.strip(" ,.\n")]
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])
