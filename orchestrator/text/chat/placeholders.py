"""Placeholders for characters while a template renders, which show the origin of text.

They are symbols: printable, without case, unchanged by every normalization, and not white space. So
a template treats them like any symbol, and lengths stay the same.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

# Byzantine musical notation and SignWriting, which are printable; then private use.
_SYMBOLS: Final = (range(0x1D000, 0x1D0F6), range(0x1D800, 0x1DA00), range(0xF0000, 0x10FFFE))
_ESCAPED: Final = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}", re.IGNORECASE)


class NoSymbolLeftError(Exception):
    """The texts contain every possible placeholder."""


def unused_symbols(texts: Iterable[str]) -> Iterator[str]:
    """Yield symbols that none of the texts contains, not even escaped as in JSON."""
    used: set[str] = set()
    for text in texts:
        used.update(text)
        used.update(json.loads(f'"{found}"') for found in _ESCAPED.findall(text))
    for symbol in map(chr, chain(*_SYMBOLS)):
        if symbol not in used:
            yield symbol
    raise NoSymbolLeftError


def is_coverable(character: str) -> bool:
    """Whether it may be replaced. Not white space and quotes, which templates split and escape."""
    return not character.isspace() and character not in "\"'\\"


class Placeholders:
    """One symbol for each of the given characters. No symbol occurs in ``texts``."""

    def __init__(self, characters: Iterable[str], texts: Iterable[str]) -> None:
        kept = sorted(filter(is_coverable, set(characters)))
        symbols = unused_symbols(texts)
        self._symbol_of = {ord(character): next(symbols) for character in kept}
        self._character_of = {ord(symbol): chr(c) for c, symbol in self._symbol_of.items()}
        self._some: dict[frozenset[str], dict[int, str]] = {}

    def cover(self, text: str, characters: frozenset[str] | None = None) -> str:
        """Replace the characters, or only those of them in ``characters``."""
        if characters is None:
            return text.translate(self._symbol_of)
        if not characters:
            return text
        if characters not in self._some:
            self._some[characters] = {
                c: symbol for c, symbol in self._symbol_of.items() if chr(c) in characters
            }
        return text.translate(self._some[characters])

    def uncover(self, text: str) -> str:
        """Put the characters back. The length stays the same."""
        return text.translate(self._character_of)

    def unescape(self, text: str) -> str:
        """Undo a template's JSON escapes of symbols."""
        return _ESCAPED.sub(self._unescaped, text) if "\\u" in text else text

    def _unescaped(self, found: re.Match[str]) -> str:
        symbol = json.loads(f'"{found[0]}"')
        character = self._character_of.get(ord(symbol))
        if character is None:
            return found[0]
        # An escaped character is plain text.
        return symbol if character.isascii() else json.dumps(character)[1:-1]
