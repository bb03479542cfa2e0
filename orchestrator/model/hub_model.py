"""Models from the hub. Complete files are kept, so a later start fetches only the rest."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from mlx_dp.orchestrator.model.model_directory import ModelSourceError
from mlx_dp.orchestrator.model.progress import Progress

# The files that mlx-lm and tokenizers read. No *.py: code from the hub runs only on request. Other
# weight files hold the same weights in other formats.
ALLOW_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def hub_model(name: str, revision: str | None, progress: Progress, *, code: bool = False) -> Path:
    """Return the local snapshot of a hub repository; without network, the cached one.

    ``code``: include Python files.
    """
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*ALLOW_PATTERNS, *(["*.py"] if code else [])],
            tqdm_class=_bar_class(f"Fetching {name}", progress),
        )
    except HFValidationError as error:
        raise ModelSourceError(
            f"--model {name!r} is neither a path that exists nor a hub id: give a directory, a "
            ".gguf file, or an id like org/name"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelSourceError(
            f"--revision {revision!r} does not exist in {name}: give a branch, tag or commit that "
            "the hub shows for it, or leave it out for the newest"
        ) from error
    except GatedRepoError as error:
        raise ModelSourceError(
            f"--model {name} is gated: accept its terms on the hub and log in with 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"--model {name} is not on the hub, or is private, and there is no such path here: "
            "check its spelling, or log in with 'hf auth login'"
        ) from error
    except Exception as error:
        # Transport errors come from several libraries, which differ between hub client versions.
        cause = error.__cause__ or error
        raise ModelSourceError(
            f"cannot fetch --model {name} from the hub ({type(cause).__name__}: {cause}): check "
            "the network, or give the path of a model directory"
        ) from error
    return Path(folder)


def _bar_class(stage: str, progress: Progress) -> type[Any]:
    """Make a tqdm that draws nothing, and passes the counts of the byte bar to ``progress``."""

    class HubBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            # By default it counts nothing when stderr is not a terminal.
            super().__init__(*args, **(kwargs | {"disable": False}))  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.unit == "B":
                progress.update(stage, int(self.n), int(self.total or 0))

    return HubBar
