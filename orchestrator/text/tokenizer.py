"""The text side of a model directory, by the ``tokenizers`` library."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from mlx_dp.orchestrator.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    read_template,
)
from mlx_dp.orchestrator.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mlx_dp.orchestrator.text.model_files import (
    chat_template_source,
    read_facts,
    read_json,
    special_tokens,
)
from mlx_dp.orchestrator.text.text_model import Chat, ModelFacts, TextModel
from mlx_dp.orchestrator.text.token_bytes import byte_level_bytes, sentencepiece_bytes
from mlx_dp.proto.errors import ConfigError

logger = logging.getLogger(__name__)


class _TokenBytes(dict[int, bytes]):
    """Bytes by token id, worked out on first use; ids without a token are not kept."""

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
    """A TextModel over one ``tokenizers.Tokenizer``, which is never changed after this."""

    def __init__(
        self, tokenizer: Tokenizer, facts: ModelFacts, template: ChatTemplate | None
    ) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self._bytes = _TokenBytes(
            tokenizer.id_to_token, byte_level_bytes if self._byte_level else sentencepiece_bytes
        )
        self._shown = _TokenBytes(self._shown_token, byte_level_bytes)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def render_chat(self, chat: Chat, *, limit_s: float) -> str:
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return self._template.render(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            arguments=chat.arguments,
            limit_s=limit_s,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def detokenizer(self) -> Detokenizer:
        if self._byte_level:
            return ByteDetokenizer(self._shown.__getitem__)
        return WindowDetokenizer(self.decode, self._hidden)

    def _shown_token(self, token: int) -> str | None:
        return None if token in self._special else self._tokenizer.id_to_token(token)

    def _hidden(self, token: int) -> bool:
        return token in self._special or self._tokenizer.id_to_token(token) is None


def load_text_model(
    directory: Path, *, trust_remote_code: bool = False, chat_template: Path | None = None
) -> TextModel:
    """Load the tokenizer, template and facts of a model directory. Raises ConfigError.

    ``trust_remote_code``: the tokenizer may be code that comes with the model.
    ``chat_template``: a jinja file in place of the model's own template.
    """
    tokenizer = _load_tokenizer(directory, trust_remote_code)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer_config = read_json(directory / "tokenizer_config.json")
    special = {**special_tokens(read_json(directory / "special_tokens_map.json"))}
    special.update(special_tokens(tokenizer_config))
    if chat_template is not None:
        source: str | None = read_template(chat_template)
    else:
        source = chat_template_source(directory, tokenizer_config)
    eos = special.get("eos_token")
    facts = read_facts(
        directory,
        vocab_size=max(tokenizer.get_vocab().values(), default=0) + 1,
        eos_token_id=None if eos is None else tokenizer.token_to_id(eos),
    )
    if not facts.eos_token_ids:
        logger.warning("%s names no end-of-text token: answers end at max_tokens", directory)
    try:
        template = None if source is None else ChatTemplate(source, special)
    except Exception as error:
        raise ConfigError(f"the chat template in {directory} is broken: {error}") from error
    return TokenizerTextModel(tokenizer, facts, template)


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        try:
            return Tokenizer.from_file(str(path))
        # The library raises bare Exception for whatever it dislikes.
        except Exception as error:
            raise ConfigError(f"{path} is no usable tokenizer: {error}") from error
    # It takes seconds to import, and few models need it.
    from transformers import AutoTokenizer

    try:
        wrapped: Any = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ConfigError(f"{directory} has no usable tokenizer: {error}") from error
    backend = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"{directory} has no tokenizer.json and its tokenizer cannot be converted to one"
        )
    return backend
