"""Loads the text side of a model directory, with the ``tokenizers`` library."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from mlx_dp.orchestrator.text.chat.chat_prompts import ChatPrompts
from mlx_dp.orchestrator.text.chat.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    read_template,
)
from mlx_dp.orchestrator.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mlx_dp.orchestrator.text.loading.end_tokens import end_token_ids, num_token_ids
from mlx_dp.orchestrator.text.loading.model_files import chat_template_source, read_facts, read_json
from mlx_dp.orchestrator.text.loading.token_bytes import byte_level_bytes, sentencepiece_bytes
from mlx_dp.orchestrator.text.loading.tokenizer_loader import LoadedTokenizer, load_tokenizer
from mlx_dp.orchestrator.text.text_model import Chat, ModelFacts, RenderedChat, TextModel
from mlx_dp.proto.errors import ConfigError

logger = logging.getLogger(__name__)


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
        convert = byte_level_bytes if self._byte_level else sentencepiece_bytes
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


def load_text_model(
    directory: Path, *, trust_remote_code: bool = False, chat_template: Path | None = None
) -> TextModel:
    """Load tokenizer, template and facts of a model directory. Raises ConfigError.

    ``trust_remote_code``: allow a tokenizer that is code of the model. ``chat_template``: a jinja
    file that replaces the model's template.
    """
    loaded = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    ends = end_token_ids(directory, loaded)
    if not ends:
        logger.warning("%s names no end-of-text token: output ends only at max_tokens", directory)
    facts = read_facts(directory, vocab_size=num_token_ids(loaded.backend), eos_token_ids=ends)
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
