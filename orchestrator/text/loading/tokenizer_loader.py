"""Loads a model's tokenizer by transformers' AutoTokenizer, like mlx-lm."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from mlx_dp.proto.errors import ConfigError

logger = logging.getLogger(__name__)

# Names of tokenizer files; one of them must exist.
_FILES: Final = "tokenizer.json, tokenizer.model, vocab.json or vocab.txt"


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """The Rust tokenizer behind transformers' wrapper, and the wrapper's additions."""

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    """Special tokens by name, such as ``eos_token``, for chat templates."""
    clean_up: Callable[[str], str] | None = None
    """Post-processing of decoded text, if the model's files ask for it."""


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> LoadedTokenizer:
    """Load the tokenizer of a model directory. Raises ConfigError.

    ``tokenizer.json`` alone is not enough: transformers also adds tokens that only
    ``tokenizer_config.json`` has, replaces parts according to the tokenizer's class, and converts
    older files. All of it changes token ids.
    """
    with _quiet_transformers():
        wrapped = _load(directory, trust_remote_code)
    backend = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"{directory} has no tokenizer.json and its tokenizer cannot be converted to one"
        )
    backend.no_truncation()
    backend.no_padding()
    cleans_up = wrapped.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
    return LoadedTokenizer(
        backend=backend,
        special_tokens=dict(wrapped.special_tokens_map),
        clean_up=wrapped.clean_up_tokenization if cleans_up else None,
    )


def _load(directory: Path, trust_remote_code: bool) -> Any:
    # Imported late: it takes seconds, and the fake engine does not need it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    # The libraries raise bare exceptions.
    except Exception as error:
        if not (directory / "tokenizer.json").exists():
            raise ConfigError(
                f"{directory} has no usable tokenizer ({_FILES}): {_first_line(error)}"
            ) from error
        reason = _first_line(error)
    # The reason is untrusted code of the model, or a config.json that transformers cannot read.
    # Neither matters for a complete tokenizer file.
    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise ConfigError(
            f"{directory / 'tokenizer.json'} is not a usable tokenizer: {_first_line(error)}"
        ) from error
    logger.warning("%s is loaded without the tokenizer's own class: %s", directory, reason)
    return loaded


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


class _ErrorsOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep its advice out of the log: about PyTorch, which is not needed, and for model authors."""
    theirs = logging.getLogger("transformers")
    errors_only = _ErrorsOnly()
    theirs.addFilter(errors_only)
    try:
        # The import itself sets the level.
        import transformers  # noqa: F401

        level = theirs.level
        theirs.setLevel(logging.ERROR)
        try:
            yield
        finally:
            theirs.setLevel(level)
    finally:
        theirs.removeFilter(errors_only)
