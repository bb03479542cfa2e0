"""Turns chats into prompts and token ids for one model. Conversation text stays text."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Encoding, Tokenizer

from mlx_dp.orchestrator.text.chat.chat_renderer import (
    ChatRenderer,
    probe_prompts,
    template_literals,
)
from mlx_dp.orchestrator.text.chat.chat_template import (
    LIMIT_S,
    ChatTemplate,
    ChatTemplateError,
    Rendering,
)
from mlx_dp.orchestrator.text.chat.control_tokens import ControlTokens, control_tokens
from mlx_dp.orchestrator.text.chat.placeholders import NoSymbolLeftError, unused_symbols
from mlx_dp.orchestrator.text.text_model import Chat, RenderedChat

REMEMBERED: Final = 16
"""Number of cached tokenizers: one with thousands of added tokens takes 30 ms to build."""


class ChatPrompts:
    """Renders with the model's template, and encodes with its tokenizer.

    ``end_ids``: the model's end tokens. ``unknown``: the tokenizer's unknown token.
    """

    def __init__(
        self,
        template: ChatTemplate,
        source: str,
        tokenizer: Tokenizer,
        *,
        end_ids: Sequence[int],
        unknown: str | None,
    ) -> None:
        self._template = template
        literals = template_literals(source)
        tokens = control_tokens(
            tokenizer.get_added_tokens_decoder(),
            end_ids=end_ids,
            unknown=unknown,
            written=[*literals, *probe_prompts(lambda chat: self._rendering(chat, LIMIT_S).text)],
        )
        normalizer = tokenizer.normalizer if tokens.any_normalized else None
        self._renderer = ChatRenderer(
            tokens, literals, None if normalizer is None else normalizer.normalize_str
        )
        self._encoder = ChatEncoder(tokenizer, tokens)

    def render(self, chat: Chat, *, limit_s: float) -> RenderedChat:
        """Return the prompt. Each rendering has ``limit_s``. Raises ChatTemplateError."""
        return self._renderer.render(chat, lambda changed: self._rendering(changed, limit_s))

    def encode(self, chat: RenderedChat) -> tuple[int, ...]:
        """Return its token ids. Raises ChatTemplateError."""
        return self._encoder.encode(chat)

    def _rendering(self, chat: Chat, limit_s: float) -> Rendering:
        return self._template.rendering(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            arguments=chat.arguments,
            limit_s=limit_s,
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A control token found by the tokenizer, with the white space that it absorbs."""

    token: int
    start: int
    end: int


class ChatEncoder:
    """Encodes as ``tokenizer`` does, except for control tokens that the template did not write.

    If there are any, it uses a tokenizer made for that prompt, of the same parts and the same
    added tokens, but with symbols that the prompt does not contain in place of control tokens. So
    the text between two control tokens is one piece, encoded with its usual context.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self._made: dict[tuple[tuple[int, str], ...], Tokenizer] = {}
        self._model = tokenizer.model
        if self._writes_control_tokens():
            self._model = _without(tokenizer, tokens.anywhere)

    def encode(self, chat: RenderedChat) -> tuple[int, ...]:
        """Return the token ids. Raises ChatTemplateError."""
        plain = self._tokenizer.encode(chat.text, add_special_tokens=False)
        if chat.marked is None:
            return tuple(plain.ids)
        own = list(self._controls(self._tokenizer.encode(chat.marked, add_special_tokens=False)))
        if list(self._controls(plain)) == own:
            return tuple(plain.ids)
        ids = self._encode_apart(chat.text, own)
        if [token for token in ids if token in self._tokens.ids] != [found.token for found in own]:
            raise ChatTemplateError("a control token in the text cannot be written as plain text")
        return ids

    def _controls(self, encoding: Encoding) -> Iterator[_Found]:
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._tokens.ids:
                yield _Found(token, start, end)

    def _encode_apart(self, text: str, own: Sequence[_Found]) -> tuple[int, ...]:
        try:
            tokens = sorted({found.token for found in own})
            symbol_of = dict(zip(tokens, unused_symbols([text]), strict=False))
        except NoSymbolLeftError as error:
            raise ChatTemplateError("the text has too many different characters") from error
        pieces: list[str] = []
        at = 0
        for found in own:
            pieces += [text[at : found.start], symbol_of[found.token]]
            at = found.end
        made = self._tokenizer_with(tuple(symbol_of.items()))
        encoding = made.encode("".join([*pieces, text[at:]]), add_special_tokens=False)
        # The made tokenizer renumbers added tokens, maybe to numbers in gaps of the model's ids.
        # Their texts tell them apart: the encoding has them with the white space they absorb.
        number_of = {symbol: token for token, symbol in symbol_of.items()}
        number_of.update((entry.content, token) for token, entry in self._plain_added())
        added = {number: entry.content for number, entry in made.get_added_tokens_decoder().items()}
        return tuple(
            number_of[added[number]] if number in added and added[number] in text else number
            for text, number in zip(encoding.tokens, encoding.ids, strict=True)
        )

    def _tokenizer_with(self, symbols: tuple[tuple[int, str], ...]) -> Tokenizer:
        """Return a tokenizer with symbols for control tokens. Most prompts use the same one."""
        # Two threads may make the same one at once, which is harmless.
        made = self._made.get(symbols)
        if made is None:
            made = _bare(self._tokenizer, self._model)
            made.add_tokens([entry for _, entry in self._plain_added()])
            made.add_tokens([_renamed(self._added[token], symbol) for token, symbol in symbols])
            if len(self._made) >= REMEMBERED:
                self._made.clear()
            self._made[symbols] = made
        return made

    def _plain_added(self) -> Iterator[tuple[int, AddedToken]]:
        return (item for item in self._added.items() if item[0] not in self._tokens.ids)

    def _writes_control_tokens(self) -> bool:
        """Whether the model turns plain text into control tokens in its vocabulary."""
        bare = _bare(self._tokenizer, self._tokenizer.model)
        encodings = bare.encode_batch(list(self._tokens.anywhere), add_special_tokens=False)
        return any(not self._tokens.ids.isdisjoint(encoding.ids) for encoding in encodings)


def _bare(tokenizer: Tokenizer, model: Any) -> Tokenizer:
    """Make a tokenizer without added tokens that shares the model's tables."""
    made = Tokenizer(model)
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer
    return made


def _renamed(entry: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized,
        special=entry.special,
    )


def _without(tokenizer: Tokenizer, removed: Iterable[str]) -> Any:
    """Return the tokenizer's model without these tokens. The others keep their ids."""
    tokens = frozenset(removed)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):
        # Ids are positions in the list, so the entry stays, under a name that no text contains.
        for index, entry in enumerate(vocab):
            if entry[0] in tokens:
                entry[0] = f"\U0010ffff{index}\U0010ffff"
    else:
        for token in tokens & vocab.keys():
            del vocab[token]
        model["merges"] = [
            merge
            for merge in model.get("merges", ())
            for parts in (merge.split(" ") if isinstance(merge, str) else merge,)
            if tokens.isdisjoint([*parts, "".join(parts)])
        ]
        if model["type"] != "BPE":
            del model["merges"]
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    bare = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts), "model": model}
    return Tokenizer.from_str(json.dumps(bare)).model
