"""Control tokens: those that only the chat template may write, never text of a conversation.

They are the added tokens that are flagged special, the end tokens, and the tokens that the template
writes to mark turns and roles. Markers of thinking and tools are part of an assistant's output, so
its messages in the history and a prefill may contain them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken

from mlx_dp.orchestrator.text.chat.chat_template import ROLES

# Other names of the assistant and tool roles in templates.
_ROLE_NAMES: Final = ROLES | {"model", "bot", "human", "observation", "ipython", "environment"}
_MARKER: Final = re.compile(r"think|thought|reason|channel|tool|func|call|arg|param", re.IGNORECASE)
_START_CHARS: Final = 4
"""Long enough that few places in code and markup match the start of a token."""
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
        """Lengths of the tokens with the same start. No start is a prefix of another."""
        self._start = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")

    def __contains__(self, token: str) -> bool:
        return token in self._tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        # A few lookups per possible start. Models have thousands of reserved tokens with the same
        # start, which an alternation of all tokens would try one by one.
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
    """Tokens that no text of a conversation may become."""
    of_assistant: TokenFinder
    """Those of them that an assistant's text may not become either."""
    markers: TokenFinder
    """Markers of thinking and tools, control tokens or not."""
    any_normalized: bool
    """Whether the tokenizer matches some of them in normalized text."""


def control_tokens(
    added: Mapping[int, AddedToken],
    *,
    end_ids: Iterable[int],
    unknown: str | None,
    written: Iterable[str],
) -> ControlTokens:
    """Classify the added tokens. ``written``: the template's own texts and its output.

    ``unknown``: the unknown token, which any text may become.
    """
    ends = frozenset(end_ids)
    texts = "\0".join(written)
    found: dict[int, str] = {}
    for token, entry in added.items():
        # Any text may contain layout, such as a token of blank lines.
        if entry.content == unknown or entry.content.isspace():
            continue
        turn = entry.content in texts and _is_turn_marker(entry.content)
        if entry.special or token in ends or turn:
            found[token] = entry.content
    markers = {entry.content for entry in added.values() if _is_marker(entry.content)}
    markers -= {found[token] for token in ends & found.keys()}
    # A marker that is part of a control token could help to build that token.
    markers -= {part for part in markers for token in found.values() if part in token != part}
    return ControlTokens(
        ids=frozenset(found),
        anywhere=TokenFinder(found.values()),
        of_assistant=TokenFinder(set(found.values()) - markers),
        markers=TokenFinder(markers),
        any_normalized=any(added[token].normalized for token in found),
    )


def _is_marker(token: str) -> bool:
    """Whether it marks thinking or tools, rather than a role."""
    return _MARKER.search(token) is not None and not _is_role(token)


def _is_turn_marker(token: str) -> bool:
    # Tokens of letters only are words, and tokens without letters are layout: both are plain text.
    mark = not token.isspace() and not token.isalnum() and any(map(str.isalpha, token))
    return mark and not _is_marker(token)


def _is_role(token: str) -> bool:
    return _NO_LETTERS.sub("", token).lower() in _ROLE_NAMES
