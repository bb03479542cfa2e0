"""Control tokens: those that a chat template writes and that no text of a conversation may become.

They are the added tokens that are flagged special, those that end an answer, and those that the
template writes as marks of turns and roles. Marks of thinking and of tools have their meaning in
what an assistant wrote, so that its history and a prefill can have them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken

from mlx_dp.orchestrator.text.chat_template import ROLES

# Most templates call the assistant or the tool by one of these instead.
_ROLE_NAMES: Final = ROLES | {"model", "bot", "human", "observation", "ipython", "environment"}
_MARKER: Final = re.compile(r"think|thought|reason|channel|tool|func|call|arg|param", re.IGNORECASE)
_START_CHARS: Final = 4
"""Few places in code and markup begin as a token does for so long."""
_NO_LETTERS: Final = re.compile(r"[\W_]+")


class TokenFinder:
    """Finds the given tokens in text as a tokenizer does: leftmost first, then the longest."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(filter(None, tokens))
        lengths: dict[str, set[int]] = {}
        for token in sorted(self._tokens, key=len):
            starts = (token[:length] for length in range(1, _START_CHARS))
            start = next((s for s in starts if s in lengths), token[:_START_CHARS])
            lengths.setdefault(start, set()).add(len(token))
        self._lengths = {start: sorted(some, reverse=True) for start, some in lengths.items()}
        """Of the tokens with the same start. No start is the beginning of another."""
        self._start = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")

    def __contains__(self, token: str) -> bool:
        return token in self._tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        # A few lookups per place where one may begin: models have thousands of reserved tokens,
        # which an alternation of them all would try one by one. They begin alike.
        while found := self._start.search(text, at):
            start = found.start()
            at = start + 1
            for length in self._lengths[found[0]]:
                token = text[start : start + length]
                if token in self._tokens:
                    at = start + len(token)
                    yield start, at
                    break


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of one model with one template."""

    ids: frozenset[int]
    anywhere: TokenFinder
    """Those that no text may become."""
    of_assistant: TokenFinder
    """Those among them that what an assistant wrote may not become either."""
    markers: TokenFinder
    """Marks of thinking and tools, control tokens or not."""
    any_normalized: bool
    """Whether the tokenizer looks for some of them in normalized text."""


def control_tokens(
    added: Mapping[int, AddedToken],
    *,
    end_ids: Iterable[int],
    unknown: str | None,
    written: Iterable[str],
) -> ControlTokens:
    """Tell the added tokens apart. ``written`` are the texts that the template has and makes.

    ``unknown`` is the token for what the vocabulary lacks: any text may become that one.
    """
    ends = frozenset(end_ids)
    texts = "\0".join(written)
    found: dict[int, str] = {}
    for token, entry in added.items():
        # Any text may contain layout, such as a token for blank lines.
        if entry.content == unknown or entry.content.isspace():
            continue
        turn = entry.content in texts and _is_turn_marker(entry.content)
        if entry.special or token in ends or turn:
            found[token] = entry.content
    markers = {entry.content for entry in added.values() if _is_marker(entry.content)}
    markers -= {found[token] for token in ends & found.keys()}
    # One that is part of a control token would help to make that one.
    markers -= {part for part in markers for token in found.values() if part in token != part}
    return ControlTokens(
        ids=frozenset(found),
        anywhere=TokenFinder(found.values()),
        of_assistant=TokenFinder(set(found.values()) - markers),
        markers=TokenFinder(markers),
        any_normalized=any(added[token].normalized for token in found),
    )


def _is_marker(token: str) -> bool:
    """Whether it marks thinking or tools, rather than who speaks."""
    return _MARKER.search(token) is not None and not _is_role(token)


def _is_turn_marker(token: str) -> bool:
    # What has letters only is a word, and what has none is layout: templates have both as text.
    mark = not token.isspace() and not token.isalnum() and any(map(str.isalpha, token))
    return mark and not _is_marker(token)


def _is_role(token: str) -> bool:
    return _NO_LETTERS.sub("", token).lower() in _ROLE_NAMES
