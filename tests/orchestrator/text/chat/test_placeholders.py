"""Placeholders are symbols that no text contains, and that no filter changes."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.text.chat.placeholders import (
    NoSymbolLeftError,
    Placeholders,
    unused_symbols,
)


@given(
    text=st.text(alphabet=st.sampled_from('<|>ab \n"\\\U0001d000\U0001d001é\ud834'), max_size=30),
    more=st.text(max_size=5),
)
def test_what_is_covered_can_be_uncovered(text: str, more: str) -> None:
    covers = Placeholders('<|>é "', [text, more])
    covered = covers.cover(text + more)
    assert len(covered) == len(text + more)
    assert covers.uncover(covered) == text + more
    assert not set("<|>é") & set(covered)


def test_symbols_stay_as_they_are() -> None:
    symbols = unused_symbols([])
    for symbol in [next(symbols) for _ in range(750)]:
        assert len(symbol) == 1 and symbol.isprintable() and not symbol.isspace()
        assert symbol.upper() == symbol.lower() == symbol.casefold() == symbol
        assert not symbol.isalnum()
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            assert unicodedata.normalize(form, symbol) == symbol


def test_symbols_of_the_text_are_not_taken() -> None:
    first = next(unused_symbols([]))
    assert next(unused_symbols([f"a{first}"])) != first
    assert next(unused_symbols([json.dumps(first).upper().replace("U", "u")])) != first


def test_escapes_of_json_are_undone() -> None:
    covers = Placeholders("<é", [])
    escaped = json.dumps(covers.cover("a<é"))[1:-1]
    assert covers.uncover(covers.unescape(escaped)) == "a<\\u00e9"
    assert covers.unescape("\\ud83d\\ude00 \\u0041") == "\\ud83d\\ude00 \\u0041"


def test_a_text_with_every_symbol_has_none_left() -> None:
    with pytest.raises(NoSymbolLeftError):
        list(unused_symbols(map(chr, range(0x1D000, 0x110000))))
