"""Reads the JSON files of a model directory, for the text side."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from msgspec import Meta

from mlx_dp.orchestrator.text.text_model import ModelFacts
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.sampling_params import MODEL_DEFAULTS, SamplingParams

logger = logging.getLogger(__name__)

_SAMPLING_TYPES: Final = get_type_hints(SamplingParams, include_extras=True)


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in the file, or an empty one if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def read_facts(directory: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> ModelFacts:
    """Read the facts about a model; the arguments come from the tokenizer."""
    config = read_json(directory / "config.json")
    text_config = config.get("text_config")
    nested: Mapping[str, Any] = text_config if isinstance(text_config, dict) else {}
    generation = read_json(directory / "generation_config.json")
    context = config.get("max_position_embeddings", nested.get("max_position_embeddings"))
    return ModelFacts(
        path=str(directory),
        model_type=str(config.get("model_type", "unknown")),
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        vocab_size=vocab_size,
        context_length=context if isinstance(context, int) else None,
        eos_token_ids=eos_token_ids,
        sampling=_sampling(generation, directory / "generation_config.json"),
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The values of a sampling parameter, those that requests may have as well."""

    lowest: float
    highest: float
    words: str

    @classmethod
    def of(cls, name: str) -> "_Bounds":
        [meta] = _SAMPLING_TYPES[name].__metadata__
        assert isinstance(meta, Meta), (name, meta)
        if meta.lt is not None:
            # Like 0, -1 turns a count off.
            return cls(-1, meta.lt - 1, f"an integer from -1 to {meta.lt - 1}")
        assert meta.le is not None, name
        if meta.gt is not None:
            above = math.nextafter(meta.gt, math.inf)
            return cls(above, meta.le, f"a number above {meta.gt:g}, and at most {meta.le:g}")
        assert meta.ge is not None, name
        return cls(meta.ge, meta.le, f"a number from {meta.ge:g} to {meta.le:g}")


def _sampling(generation: Mapping[str, Any], path: Path) -> SamplingParams:
    found: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        bounds = _Bounds.of(name)
        counts = isinstance(getattr(SamplingParams(), name), int)
        value = generation.get(name)
        if value is None:
            continue
        number = type(value) in (int, float) and math.isfinite(value)
        whole = not counts or (number and value == int(value))
        if not number or not whole or not bounds.lowest <= value <= bounds.highest:
            # Only a warning, since a client can set its own value.
            logger.warning(
                "%s: %s is ignored: it should be %s, and is %.80s",
                path,
                name,
                bounds.words,
                ascii(value),
            )
            continue
        found[name] = max(0, int(value)) if counts else float(value)
    return SamplingParams(**found)


def named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in the file, such as bos_token, by name."""
    found: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def chat_template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the model's template or None. A separate file takes precedence."""
    own = directory / "chat_template.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    value = tokenizer_config.get("chat_template")
    if value is None:
        value = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None
