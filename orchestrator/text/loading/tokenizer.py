"""Loads the text side of a model directory, with the ``tokenizers`` library."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from mlx_dp.orchestrator.text.chat.chat_prompts import ChatPrompts
from mlx_dp.orchestrator.text.chat.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    read_template,
)
from mlx_dp.orchestrator.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mlx_dp.orchestrator.text.loading.model_files import (
    chat_template_source,
    named_tokens,
    read_facts,
    read_json,
)
from mlx_dp.orchestrator.text.loading.tokenizer_loader import LoadedTokenizer, load_tokenizer
from mlx_dp.orchestrator.text.text_model import Chat, ModelFacts, RenderedChat, TextModel
from mlx_dp.proto.errors import ConfigError

_END_NAMES: Final = ("eos_token", "eot_token", "eom_token")
"""End of text, end of a turn, and end of a message (before a tool's result)."""

logger = logging.getLogger(__name__)


def load_text_model(
    directory: Path, *, trust_remote_code: bool = False, chat_template: Path | None = None
) -> TextModel:
    """Load tokenizer, template and facts of a model directory. Raises ConfigError.

    ``trust_remote_code``: allow a tokenizer that is code of the model. ``chat_template``: a jinja
    file that replaces the model's template.
    """
    loaded = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    ends = _end_token_ids(directory, loaded)
    if not ends:
        logger.warning("%s names no end-of-text token: output ends only at max_tokens", directory)
    facts = read_facts(directory, vocab_size=_num_token_ids(loaded.backend), eos_token_ids=ends)
    chats = _chat_prompts(directory, loaded, ends, chat_template)
    return TokenizerTextModel(loaded.backend, facts, chats, loaded.clean_up)


def _chat_prompts(
    directory: Path, loaded: LoadedTokenizer, ends: Sequence[int], override: Path | None
) -> ChatPrompts | None:
    if override is not None:
        source: str | None = read_template(override)
    else:
        source = chat_template_source(directory, read_json(directory / "tokenizer_config.json"))
    if source is None:
        return None
    try:
        template = ChatTemplate(source, loaded.special_tokens)
    except ChatTemplateError as error:
        raise ConfigError(
            f"the chat template in {directory} is broken ({error}): give one that works as "
            "--chat-template FILE"
        ) from error
    return ChatPrompts(
        template,
        source,
        loaded.backend,
        end_ids=ends,
        unknown=loaded.special_tokens.get("unk_token"),
    )


class TokenizerTextModel:
    """A TextModel over one ``tokenizers.Tokenizer``, which must not be changed afterwards.

    ``clean_up``: post-processing of decoded text, if any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        chats: ChatPrompts | None = None,
        clean_up: Callable[[str], str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._chats = chats
        self._clean_up = clean_up
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        self._byte_level = isinstance(tokenizer.decoder, ByteLevel)
        convert = _byte_level_bytes if self._byte_level else _sentencepiece_bytes
        self._bytes = _TokenBytes(tokenizer.id_to_token, convert)
        self._plain_bytes = _TokenBytes(self._plain_token, convert)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def render_chat(self, chat: Chat, *, limit_s: float) -> RenderedChat:
        return self._prompts().render(chat, limit_s=limit_s)

    def encode_chat(self, chat: RenderedChat) -> tuple[int, ...]:
        return self._prompts().encode(chat)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return text if self._clean_up is None else self._clean_up(text)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def special_text(self, token: int) -> str:
        return self._special.get(token, "")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        if self._byte_level:
            shown = self._plain_bytes if skip_special_tokens else self._bytes
            return ByteDetokenizer(shown.__getitem__)
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return WindowDetokenizer(decode, self._hidden if skip_special_tokens else self._unknown)

    def _prompts(self) -> ChatPrompts:
        if self._chats is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return self._chats

    def _plain_token(self, token: int) -> str | None:
        return None if token in self._special else self._tokenizer.id_to_token(token)

    def _hidden(self, token: int) -> bool:
        return token in self._special or self._unknown(token)

    def _unknown(self, token: int) -> bool:
        return self._tokenizer.id_to_token(token) is None


class _TokenBytes(dict[int, bytes]):
    """Bytes by token id, computed on first use. Ids without a token are not cached."""

    def __init__(self, token: Callable[[int], str | None], convert: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token = token
        self._convert = convert

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        self[token_id] = self._convert(token)
        return self[token_id]


def _bytes_of_characters() -> dict[str, int]:
    # GPT-2's table: printable bytes map to themselves, the others to U+0100 and up.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER: Final[Mapping[str, int]] = _bytes_of_characters()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of one token, as in the ByteLevel decoder of ``tokenizers``."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # An added token with other characters is plain text.
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    """The bytes of one SentencePiece token. ``<0x0A>`` is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()


def _end_token_ids(directory: Path, loaded: LoadedTokenizer) -> tuple[int, ...]:
    """Return the end tokens that any file of the directory names, in the order of the files.

    Raises ConfigError for a token without an id.
    """
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
    return max(*known, _num_token_ids(tokenizer)) if known else None


def _num_token_ids(tokenizer: Tokenizer) -> int:
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
