"""Renders chats, and determines which control tokens of the prompt the template wrote.

The prompt alone does not show it: pieces of a conversation can join into a control token, and
filters can make one. The rendering tracks the origin of text that the template wrote or joined,
which covers nearly everything. Any other control token is in doubt, since a method called on text
hides its origin. Then the characters themselves carry it: the conversation is rendered again with
placeholders for all characters of control tokens, so that its text cannot become one, whatever the
template does to it. If both prompts are equal apart from the placeholders, the second shows the
origin of each character of the first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Protocol

import jinja2

from mlx_dp.orchestrator.text.chat.chat_template import (
    ROLES,
    ChatTemplateError,
    ChatTemplateTimeoutError,
    Rendering,
)
from mlx_dp.orchestrator.text.chat.control_tokens import ControlTokens, TokenFinder
from mlx_dp.orchestrator.text.chat.placeholders import NoSymbolLeftError, Placeholders, is_coverable
from mlx_dp.orchestrator.text.text_model import Chat, RenderedChat

Render = Callable[[Chat], Rendering]
Change = Callable[[str, bool], str]
"""Maps a string of a chat; the flag says that an assistant wrote it."""

_SAID: Final = frozenset({"content", "reasoning_content", "thinking", "reasoning"})
"""Members of an assistant's message that hold its literal output."""
_PROBED_ROLES: Final = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool"),
)


class Normalize(Protocol):
    def __call__(self, sequence: str, /) -> str: ...


def template_literals(source: str) -> tuple[str, ...]:
    """Return the text and the string constants of a template."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    try:
        tokens = list(environment.lexer.tokenize(source))
    except jinja2.TemplateError:
        # Compiling the template will report it.
        return ()
    return tuple(str(token.value) for token in tokens if token.type in ("data", "string"))


def probe_prompts(render: Callable[[Chat], str]) -> Iterator[str]:
    """Yield prompts with every role, since a template may assemble a token from parts."""
    for roles in _PROBED_ROLES:
        messages = [{"role": role, "content": "x"} for role in roles]
        try:
            yield render(Chat(messages=messages))
        except ChatTemplateError:
            continue


@dataclass(frozen=True, slots=True)
class _Alphabet:
    """The characters of control tokens."""

    all: frozenset[str]
    signs: frozenset[str]
    """Characters other than letters and digits; one letter of each token without any."""
    first_signs: frozenset[str]
    """The first sign of each token. No token can arise without one of these."""


def _alphabet(tokens: Iterable[str]) -> _Alphabet:
    everything: set[str] = set()
    signs: set[str] = set()
    first: set[str] = set()
    for token in tokens:
        characters = [c for c in token if is_coverable(c)]
        of_token = [c for c in characters if not c.isalnum()] or characters[:1]
        everything.update(characters)
        signs.update(of_token)
        first.update(of_token[:1])
    cases = {form for c in everything for form in (c.upper(), c.lower()) if len(form) == 1}
    first |= {form for c in first for form in (c.upper(), c.lower()) if len(form) == 1}
    return _Alphabet(frozenset(everything | cases), frozenset(signs | first), frozenset(first))


class ChatRenderer:
    """Renders with one template. ``literals``: its texts and string constants.

    ``normalize``: the tokenizer's normalization before it looks for control tokens, if any. It may
    turn other characters into those of control tokens.
    """

    def __init__(
        self, tokens: ControlTokens, literals: Iterable[str], normalize: Normalize | None = None
    ) -> None:
        self._tokens = tokens
        self._literals = tuple(literals)
        self._normalize = normalize
        self._alphabet = _alphabet(tokens.anywhere)
        self._known = TokenFinder([*tokens.anywhere, *tokens.markers])
        self._has_parts = self._may_complete_parts()

    def render(self, chat: Chat, render: Render) -> RenderedChat:
        """Return the prompt, with a marked version if the origin of control tokens is in doubt."""
        texts = _strings(chat)
        try:
            rendering = None if self._has_token(texts) else render(chat)
            if rendering is not None and self._is_plain(rendering):
                return RenderedChat(rendering.text)
            folded = self._folded(texts)
            if not self._in_doubt(texts, folded):
                return RenderedChat((rendering or render(chat)).text)
            return self._render_again(chat, render, texts, folded)
        except NoSymbolLeftError as error:
            raise ChatTemplateError("the text has too many different characters") from error
        except RecursionError as error:
            raise ChatTemplateError("the messages are nested too deeply") from error

    def _has_token(self, texts: list[str]) -> bool:
        """Whether one of the texts contains a control token, which no template may see."""
        return any(True for _ in self._tokens.anywhere.spans("\0".join(texts)))

    def _is_plain(self, rendering: Rendering) -> bool:
        """Whether the template itself wrote all control tokens that the tokenizer will find."""
        spans = self._tokens.anywhere.spans(rendering.text)
        return self._normalize is None and rendering.is_templates_own(spans)

    def _folded(self, texts: list[str]) -> frozenset[str]:
        """Characters of the texts that the tokenizer normalizes to those of control tokens."""
        if self._normalize is None:
            return frozenset()
        signs = self._alphabet.signs
        characters: set[str] = set().union(*texts) - signs
        return frozenset(c for c in characters if not signs.isdisjoint(self._normalize(c)))

    def _in_doubt(self, texts: list[str], folded: frozenset[str]) -> bool:
        signs = self._alphabet.first_signs
        if self._has_parts or folded:
            return True
        return any(sign in text for text in texts for sign in signs)

    def _render_again(
        self, chat: Chat, render: Render, texts: list[str], folded: frozenset[str]
    ) -> RenderedChat:
        everything = self._alphabet.all | folded
        covers = Placeholders(everything, [*texts, *self._literals])

        def rendered(covered: frozenset[str]) -> str:
            changed = _changed(chat, lambda text, own: self._covered(text, own, covers, covered))
            return covers.unescape(render(changed).text)

        neutral = rendered(frozenset())
        signs = self._alphabet.signs | folded
        # If the template writes all signs of a token, letters between them complete it.
        levels = [everything, signs] if self._has_parts else [signs]
        marked = self._marked(neutral, covers.uncover, [partial(rendered, c) for c in levels])
        text = covers.uncover(marked)
        spans = list(self._tokens.anywhere.spans(text))
        if self._normalize is None and spans == list(self._tokens.anywhere.spans(marked)):
            return RenderedChat(text)
        return RenderedChat(text, marked)

    def _marked(
        self, neutral: str, uncover: Callable[[str], str], attempts: Sequence[Callable[[], str]]
    ) -> str:
        """Return the prompt that shows the template's tokens. ``attempts`` cover less and less."""
        text = uncover(neutral)
        safest: str | None = None
        for attempt in attempts:
            try:
                marked = attempt()
            except ChatTemplateError as error:
                # Some templates compare words with known ones, and refuse others.
                if attempt is attempts[-1] or isinstance(error, ChatTemplateTimeoutError):
                    raise
                continue
            safest = marked if safest is None else safest
            if uncover(marked) == text:
                break
        else:
            marked = neutral
        assert safest is not None
        # The prompts differ if the template depends on covered text. That is fine while its control
        # tokens are the same; otherwise the prompt of the fully covered conversation is safe.
        return marked if self._controls(marked) == self._controls(safest) else safest

    def _covered(
        self, text: str, by_assistant: bool, covers: Placeholders, characters: frozenset[str]
    ) -> str:
        """Cover whole control tokens, and the given characters elsewhere; markers stay."""
        if not characters and not any(sign in text for sign in self._alphabet.first_signs):
            return text
        tokens = self._tokens.of_assistant if by_assistant else self._tokens.anywhere
        pieces: list[str] = []
        end = 0
        for start, stop in self._known.spans(text):
            pieces.append(covers.cover(text[end:start], characters))
            token = text[start:stop]
            pieces.append(covers.cover(token) if token in tokens else token)
            end = stop
        return "".join([*pieces, covers.cover(text[end:], characters)])

    def _controls(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self._tokens.anywhere.spans(text)]

    def _may_complete_parts(self) -> bool:
        """Whether the template writes the beginning of a control token, with its first sign.

        Conversation text after it may then complete the token without any suspicious character.
        """
        signs = self._alphabet.first_signs
        beginnings: set[str] = set()
        inner: set[str] = set()
        for token in self._tokens.anywhere:
            first = next((i for i, c in enumerate(token) if c in signs), len(token))
            beginnings.update(token[:length] for length in range(first + 1, len(token)))
            inner.update(token[first : first + 1] if first else "")
        longest = max(map(len, beginnings), default=0)
        for literal in self._literals:
            ends = (literal[-length:] for length in range(1, min(longest, len(literal)) + 1))
            if not beginnings.isdisjoint(ends) or not inner.isdisjoint(literal):
                return True
        return False


def _strings(chat: Chat) -> list[str]:
    """Return all strings of a chat, including names of members, in any order."""
    # Fast path: most of a long chat is messages of two strings.
    waiting: list[object] = [*set().union(*chat.messages)]
    for message in chat.messages:
        waiting += message.values()
    waiting += [getattr(chat, field.name) for field in fields(chat) if field.name != "messages"]
    found: list[str] = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return found


def _changed(chat: Chat, change: Change) -> Chat:
    """Return the chat with every free-text string mapped by ``change``."""
    changed: dict[str, Any] = {
        field.name: _walked(getattr(chat, field.name), change, False)
        for field in fields(chat)
        if field.name != "messages"
    }
    messages = [_changed_message(message, change) for message in chat.messages]
    return replace(chat, messages=messages, **changed)


def _changed_message(message: Mapping[str, object], change: Change) -> Mapping[str, object]:
    role = message.get("role")
    by_assistant = _SAID if role == "assistant" else frozenset()
    changed = {key: _walked(value, change, key in by_assistant) for key, value in message.items()}
    if isinstance(role, str) and role in ROLES:
        changed["role"] = role
    return changed


def _walked(value: object, change: Change, by_assistant: bool) -> object:
    if isinstance(value, str):
        return change(value, by_assistant)
    if isinstance(value, Mapping):
        return {
            _changed_key(key, change, by_assistant): item
            if _is_kind(key, item)
            else _walked(item, change, by_assistant)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walked(item, change, by_assistant) for item in value]
    return value


def _changed_key(key: object, change: Change, by_assistant: bool) -> object:
    # Templates look up names such as "text" or "function", so these stay.
    if isinstance(key, str) and not key.isidentifier():
        return change(key, by_assistant)
    return key


def _is_kind(key: object, item: object) -> bool:
    """Whether it names the kind of a part or tool, which templates compare with constants."""
    return key == "type" and isinstance(item, str) and item.isidentifier()
