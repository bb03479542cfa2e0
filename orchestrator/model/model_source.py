"""Resolves ``--model`` to a directory that mlx-lm can load."""

import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mlx_dp.orchestrator.model.demo_model import DEMO_NAME, demo_model
from mlx_dp.orchestrator.model.model_cache import ModelCache, Storage, gguf_model
from mlx_dp.orchestrator.model.model_directory import ModelSourceError, check_model_dir, only_gguf
from mlx_dp.orchestrator.model.progress import Progress

DeviceKind = Literal["cpu", "metal", "cuda"]
_LINK: Final = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)"
    r"(?:models/)?(?P<name>[^/?#\s]+/[^/?#\s]+)"
    r"(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/?#\s]+))?(?:[/?#]\S*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A checked model directory, and its name for clients."""

    path: Path
    served_name: str


def resolve_model(
    model: str | None,
    *,
    revision: str | None,
    cache_dir: Path,
    progress: Progress,
    device: DeviceKind,
    trust_remote_code: bool = False,
) -> ResolvedModel:
    """Find, fetch or convert the model. Raises ModelSourceError.

    A local path wins over a hub id of the same spelling. ``trust_remote_code``: run Python code
    that comes with the model.
    """
    resolved = _resolve(
        model,
        revision=revision,
        cache=ModelCache(cache_dir, progress),
        progress=progress,
        storage="4bit" if device == "metal" else "float32",
        trust_remote_code=trust_remote_code,
    )
    check_model_dir(resolved.path, trust_remote_code=trust_remote_code)
    return resolved


def host_device() -> DeviceKind:
    """Guess MLX's device without MLX, which the controller must not load."""
    return "metal" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"


def _resolve(
    model: str | None,
    *,
    revision: str | None,
    cache: ModelCache,
    progress: Progress,
    storage: Storage,
    trust_remote_code: bool,
) -> ResolvedModel:
    if model is None:
        _refuse_revision(revision, "the demo model")
        path = demo_model(cache, storage, progress)
        return ResolvedModel(path=path, served_name=DEMO_NAME)
    if not model:
        # As a path it would be the current directory.
        raise ModelSourceError("--model is empty: name a model, or omit it to serve the demo model")
    local = _local_path(model)
    if local.is_dir():
        _refuse_revision(revision, f"the directory {model}")
        gguf = only_gguf(local)
        if gguf is None:
            return ResolvedModel(path=local, served_name=local.resolve().name)
        local = gguf
    if local.suffix == ".gguf" and local.is_file():
        _refuse_revision(revision, f"the file {model}")
        path = gguf_model(cache, local, storage)
        return ResolvedModel(path=path, served_name=local.stem)
    if local.exists():
        raise ModelSourceError(
            f"--model {model} is neither a directory nor a .gguf file: name the directory that "
            "holds config.json and the weights, or a .gguf file"
        )
    name, linked = hub_name(model)
    if name != model and _names_gguf(model):
        raise ModelSourceError(
            f"--model {model} is a link to one file: download it, and give its path"
        )
    if _means_path(model):
        where = "" if local.is_absolute() else f" in {Path.cwd()}"
        raise ModelSourceError(f"--model {model} does not exist{where}: check the path")
    if None not in (revision, linked) and revision != linked:
        raise ModelSourceError(
            f"--revision {revision} is not the {linked} of the link {model}: name one of the two"
        )
    # Imported late: it takes a third of the start-up time.
    from mlx_dp.orchestrator.model.hub_model import hub_model

    path = hub_model(name, revision or linked, progress, code=trust_remote_code)
    return ResolvedModel(path=path, served_name=name)


def _local_path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        # ``~name`` of an unknown user.
        raise ModelSourceError(
            f"--model {model} names no home directory on this machine: give the full path"
        ) from error


def _means_path(model: str) -> bool:
    """Whether it looks like a path, so that a mistyped path is not looked up on the hub."""
    return model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or "\\" in model


def _names_gguf(link: str) -> bool:
    return re.split(r"[?#]", link, maxsplit=1)[0].strip().endswith(".gguf")


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelSourceError(
            f"--revision {revision} works with a hub id only, and --model names {what}"
        )


def hub_name(model: str) -> tuple[str, str | None]:
    """Split a link to a model's hub page into hub id and revision; return other text unchanged."""
    found = _LINK.fullmatch(model.strip())
    return (model, None) if found is None else (found["name"], found["revision"])
