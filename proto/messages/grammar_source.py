"""Converts grammars to llguidance's form. Importing this loads the library."""

from typing import Final, assert_never

from llguidance import LLMatcher, LLParserLimits

from mlx_dp.proto.messages.grammar import Grammar, GrammarKind

# Unlimited, a weak model could fill its whole answer with white space, which is valid JSON.
JSON_WHITESPACE: Final = r" |\n{1,2}[ \t]{0,20}"


def guidance_source(grammar: Grammar) -> str:
    """Return the grammar in the library's own form, without checking its validity.

    Raises ValueError for a schema that is not JSON.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case _:
            assert_never(grammar.kind)


def guidance_limits() -> LLParserLimits:
    """Return the limits of one grammar, the same wherever it is compiled.

    Verbose errors would quote the answer so far.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
