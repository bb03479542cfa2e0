"""A compiler's error message about a grammar, on one short line."""

import pytest

from mlx_dp.proto.messages.grammar import MAX_COMPLAINT_CHARS, complaint_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("\n", ""),
        ("unknown name\n   1 | start: a\n", "unknown name"),
        ("at 1(8): invalid regex\n    (\n    ^\nerror: unclosed group\n", "unclosed group"),
        ("bad \x07\x1b[31m\x7f", "bad   [31m "),
        ("bad \u00e9\u2028", "bad \\xe9"),
        ("bad \U0001f600", "bad \\U0001f600"),
    ],
)
def test_the_line_that_says_it_is_shown_in_printable_ascii(message: str, line: str) -> None:
    assert complaint_line(message) == line


def test_a_long_line_is_cut() -> None:
    found = complaint_line("x" * 10_000)
    assert found == "x" * MAX_COMPLAINT_CHARS + "..."
