"""Finds the end tokens of a model, in all files of its directory that name any."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from mlx_dp.orchestrator.text.loading.model_files import named_tokens, read_json
from mlx_dp.orchestrator.text.loading.tokenizer_loader import LoadedTokenizer
from mlx_dp.proto.errors import ConfigError

_END_NAMES: Final = ("eos_token", "eot_token", "eom_token")
"""End of text, end of a turn, and end of a message (before a tool's result)."""


def end_token_ids(directory: Path, loaded: LoadedTokenizer) -> tuple[int, ...]:
    """Return the ids, in the order of the files. Raises ConfigError for a token without an id."""
    found = [
        *_ids_of(directory / "generation_config.json", loaded.backend, directory),
        *_ids_of(directory / "config.json", loaded.backend, directory),
        *_named(directory, loaded.backend),
    ]
    for name in _END_NAMES:
        token = loaded.backend.token_to_id(loaded.special_tokens.get(name, ""))
        if token is not None:
            found.append(token)
    return tuple(dict.fromkeys(found))


def _ids_of(path: Path, tokenizer: Tokenizer, directory: Path) -> Iterator[int]:
    """Yield the ids of ``eos_token_id``, which is one id, a list, or absent."""
    content = read_json(path)
    limit = _num_tokens(read_json(directory / "config.json"), tokenizer)
    for part in (content, content.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, dict) else None
        for token in value if isinstance(value, list) else [value]:
            found = tokenizer.token_to_id(token) if isinstance(token, str) else token
            # Some files use a negative id for none.
            if token is None or (type(found) is int and found < 0):
                continue
            if type(found) is not int or (limit is not None and found >= limit):
                raise ConfigError(
                    f"{path} names {token!r} as eos_token_id, which is not a token of this model"
                )
            yield found


def _num_tokens(config: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    """The number of ids of the model or tokenizer, or None if the model does not say."""
    nested = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, nested) if isinstance(part, dict)]
    known = [size for size in sizes if type(size) is int]
    return max(*known, num_token_ids(tokenizer)) if known else None


def num_token_ids(tokenizer: Tokenizer) -> int:
    """One more than the highest id. There may be gaps below it."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _named(directory: Path, tokenizer: Tokenizer) -> Iterator[int]:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        tokens = named_tokens(read_json(path))
        for kind in _END_NAMES:
            if kind in tokens:
                yield _resolve(directory, path, kind, tokens[kind], tokenizer)


def _resolve(directory: Path, path: Path, kind: str, token: str, tokenizer: Tokenizer) -> int:
    """Return the id of a token, as the files state it.

    transformers invents an id for a special token that no file lists, and may do so for one that
    ``added_tokens_decoder`` lists after a gap. The model never generates such ids.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(f"{path} names {token!r} as {kind}, which the tokenizer does not have")
    written = _written_id(directory, token)
    # Without a tokenizer.json the vocabulary was converted, with tokens that are in no list.
    listed = (directory / "tokenizer.json").exists()
    if listed and written is None and token not in tokenizer.get_vocab(with_added_tokens=False):
        raise ConfigError(
            f"{path} names {token!r} as {kind}, but neither the tokenizer's vocabulary nor "
            "added_tokens_decoder gives it an id"
        )
    if written not in (None, found):
        raise ConfigError(
            f"{path} names {token!r} as {kind} with id {written} in added_tokens_decoder, but "
            f"the tokenizer gives it {found}: tokens are missing before it"
        )
    return found


def _written_id(directory: Path, token: str) -> int | None:
    """The id of the token in one of the lists of added tokens."""
    decoder = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == token and number.isdecimal():
            return int(number)
    older = read_json(directory / "added_tokens.json").get(token)
    if type(older) is int:
        return older
    added = read_json(directory / "tokenizer.json").get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if entry.get("content") == token:
            return entry["id"] if type(entry.get("id")) is int else None
    return None
