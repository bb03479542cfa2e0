"""Any output that a model draws within the masks matches its grammar."""

import json
import re

import jsonschema
import numpy as np
import pytest

from mlx_dp.worker.grammar.compiler import GrammarCompiler, GrammarError
from mlx_dp.worker.grammar.masks import GrammarMasks
from tests.support.batches.grammar_answers import (
    allowed,
    json_schema,
    lark,
    play,
    regex,
    request,
    text_of,
)
from tests.support.text.tiny_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer

PADDED = VOCAB_SIZE + 44
STOPS = (EOS_TOKEN_ID, 0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture
def compiler(model_path):
    return GrammarCompiler(model_path, PADDED)


@pytest.fixture
def text(model_path):
    return lambda ids: text_of(model_path / "tokenizer.json", ids)


def closing(tokens):
    """Ends numbers and strings sooner than chance would."""
    ends = [token for token in tokens if token in STOPS or chr_of(token) in ('"', "}", "]", ",")]
    return np.array(ends)


def chr_of(token):
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return alphabet[token - 4] if 4 <= token < VOCAB_SIZE else ""


@pytest.mark.parametrize("seed", range(8))
def test_every_json_answer_validates_against_its_schema(compiler, text, seed):
    masks = GrammarMasks(compiler)
    masks.join(7, request(json_schema(json.dumps(SCHEMA)), STOPS))
    prefer = closing if seed % 2 else None
    answer = play(masks, [7], STOPS, seed=seed, prefer=prefer)[7]
    assert answer[-1] in STOPS
    jsonschema.validate(json.loads(text(answer)), SCHEMA)


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-f]+", "(yes|no)", "[é€😀]{1,4}", "a?b?c?"])
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_matches_its_pattern(compiler, text, pattern, seed):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex(pattern), STOPS))
    answer = play(masks, [1], STOPS, seed=seed)[1]
    assert re.fullmatch(pattern, text(answer))


def test_a_lark_grammar_is_followed(compiler, text):
    masks = GrammarMasks(compiler)
    masks.join(1, request(lark('start: "(" start ")" | "x"'), STOPS))
    answer = text(play(masks, [1], STOPS, seed=3)[1])
    assert re.fullmatch(r"(\(*)x(\)*)", answer)
    assert answer.count("(") == answer.count(")")


@pytest.mark.parametrize("alternatives", [['é"\\', "a\nb"], ["{x}", "\u2028 ", "😀"], ["a", "ab"]])
def test_strings_are_alternatives_as_they_are(compiler, text, alternatives):
    strings = " | ".join(json.dumps(each, ensure_ascii=False) for each in alternatives)
    masks = GrammarMasks(compiler)
    seen = set()
    for seed in range(12):
        masks.join(seed, request(lark(f"start: {strings}"), STOPS))
        seen.add(text(play(masks, [seed], STOPS, seed=seed)[seed]))
    assert seen == set(alternatives)


def test_rows_of_one_batch_follow_each_its_own_and_others_none(compiler, text):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("[0-9]{5}"), STOPS))
    masks.join(2, request(None, STOPS))
    masks.join(3, request(json_schema('{"type":"boolean"}'), STOPS))
    assert len(masks) == 2
    found = masks.fill([2, 3, 1])
    assert found is not None
    assert found.rows == (1, 2)
    answers = play(masks, [2, 3, 1], STOPS)
    assert re.fullmatch("[0-9]{5}", text(answers[1]))
    assert text(answers[3]) in ("true", "false")


def test_rows_without_grammars_have_no_masks(compiler):
    masks = GrammarMasks(compiler)
    masks.join(2, request(None, STOPS))
    assert not masks
    assert masks.fill([2]) is None


def test_only_stop_tokens_may_follow_a_complete_answer(compiler):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("a"), STOPS))
    token = int(allowed(masks.fill([1]), 0)[0])
    masks.advance([(1, token)])
    assert set(allowed(masks.fill([1]), 0)) == set(STOPS)


def test_no_stop_token_may_end_an_answer_that_is_not_complete(compiler):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("ab"), STOPS))
    for _ in range(2):
        tokens = allowed(masks.fill([1]), 0)
        assert not set(tokens) & set(STOPS)
        masks.advance([(1, int(tokens[0]))])


def test_the_tokenizers_own_end_is_no_end_unless_the_request_has_it(compiler):
    masks = GrammarMasks(compiler)
    own = next(token for token in range(200, 260))
    masks.join(1, request(regex("a"), (own,)))
    masks.advance([(1, int(allowed(masks.fill([1]), 0)[0]))])
    assert list(allowed(masks.fill([1]), 0)) == [own]


def test_tokens_beyond_the_tokenizer_are_never_allowed(compiler):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("(?s:.*)"), STOPS))
    tokens = allowed(masks.fill([1]), 0)
    assert len(tokens) > 100
    assert max(tokens) < VOCAB_SIZE


def test_a_replay_goes_on_where_the_first_owner_was(compiler):
    grammar = json_schema(json.dumps(SCHEMA))
    whole = GrammarMasks(compiler)
    whole.join(1, request(grammar, STOPS))
    answer = play(whole, [1], STOPS, seed=5)[1]
    for cut in (0, 1, len(answer) // 2, len(answer) - 1):
        first, again = GrammarMasks(compiler), GrammarMasks(compiler)
        first.join(1, request(grammar, STOPS))
        for token in answer[:cut]:
            first.fill([1])
            first.advance([(1, token)])
        again.join(9, request(grammar, STOPS, output_ids=answer[:cut]))
        for token in answer[cut:]:
            expected, found = first.fill([1]), again.fill([9])
            assert np.array_equal(expected.bits, found.bits)
            first.advance([(1, token)])
            again.advance([(9, token)])


def test_a_row_that_leaves_and_comes_back_starts_anew(compiler):
    masks = GrammarMasks(compiler)
    for _ in range(2):
        masks.join(1, request(regex("ab"), STOPS))
        first = allowed(masks.fill([1]), 0)
        assert [chr_of(token) for token in first] == ["a"]
        masks.advance([(1, int(first[0]))])
        masks.leave(1)
    assert not masks


def test_a_surplus_token_behind_the_end_changes_nothing(compiler):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("a"), STOPS))
    masks.advance([(1, int(allowed(masks.fill([1]), 0)[0]))])
    masks.fill([1])
    masks.advance([(1, EOS_TOKEN_ID)])
    assert len(allowed(masks.fill([1]), 0)) >= PADDED
    masks.advance([(1, 77)])
    assert not masks.faults()


def test_a_token_that_was_masked_is_our_error(compiler):
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("a"), STOPS))
    tokens = set(allowed(masks.fill([1]), 0))
    with pytest.raises(AssertionError, match="masked"):
        masks.advance([(1, next(token for token in range(4, 260) if token not in tokens))])


def test_a_grammar_that_becomes_too_costly_is_the_fault_of_its_row_alone(compiler):
    masks = GrammarMasks(compiler)
    masks.join(1, request(lark('start: e{100000}\ne: "a"{100000}'), STOPS))
    masks.join(2, request(regex("[0-9]+"), STOPS))
    for _ in range(3):
        found = masks.fill([1, 2])
        masks.advance([(1, int(allowed(found, 0)[0])), (2, int(allowed(found, 1)[0]))])
    assert masks.faults().keys() == {1}
    assert "\n" not in masks.faults()[1]
    assert set(map(chr_of, allowed(masks.fill([1, 2]), 1))) >= set("0123456789")


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (regex("("), "unclosed"),
        (json_schema('{"type":"no"}'), "no"),
        (json_schema("{"), "json_schema"),
        (lark("start: other"), "other"),
        (lark('start: "a" <[99999]>'), "99999"),
    ],
)
def test_what_does_not_compile_is_a_fault_and_no_crash(compiler, grammar, says):
    fault = compiler.fault(grammar, STOPS)
    assert fault is not None
    assert says in fault
    assert compiler.fault(regex("a"), STOPS) is None


def test_stop_tokens_beyond_the_logits_end_nothing(compiler):
    assert "stop token" in str(compiler.fault(regex("a"), (PADDED, 10**6)))
    assert "stop token" in str(compiler.fault(regex("a"), ()))
    assert compiler.fault(regex("a"), (PADDED, 2)) is None


def test_a_model_without_a_tokenizer_follows_no_grammar(tmp_path):
    compiler = GrammarCompiler(tmp_path, PADDED)
    assert "tokenizer" in str(compiler.fault(regex("a"), STOPS))
    with pytest.raises(GrammarError):
        compiler.begin(regex("a"), STOPS)


def test_the_tokenizer_is_read_once_and_before_the_first_grammar(compiler, monkeypatch):
    compiler.warm_up()
    monkeypatch.setattr(compiler, "_load_tokenizer", None)
    assert compiler.fault(regex("a"), STOPS) is None


def test_a_model_without_a_tokenizer_warms_up_and_says_so_to_each_grammar(tmp_path, monkeypatch):
    compiler = GrammarCompiler(tmp_path, PADDED)
    compiler.warm_up()
    monkeypatch.setattr(compiler, "_load_tokenizer", None)
    for _ in range(2):
        assert "tokenizer" in str(compiler.fault(regex("a"), STOPS))


def test_a_tokenizer_larger_than_the_logits_is_a_fault(model_path):
    assert "vocab" in str(GrammarCompiler(model_path, 100).fault(regex("a"), STOPS))


def ends_at_once(tokens):
    return np.array([token for token in tokens if token in STOPS])


@pytest.mark.parametrize(("least", "length"), [(0, 1), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_an_answer_does_not_end_before_its_least_length_while_its_grammar_goes_on(
    compiler, text, least, length
):
    masks = GrammarMasks(compiler)
    # Complete after each letter, and with nothing to follow after the fifth.
    masks.join(1, request(regex("[a-c]{1,5}"), STOPS, min_tokens=least))
    answer = play(masks, [1], STOPS, prefer=ends_at_once)[1]
    assert answer[-1] in STOPS
    assert len(text(answer)) == length


@pytest.mark.parametrize("emitted", range(5))
def test_what_an_earlier_owner_emitted_is_part_of_the_least_length(compiler, text, emitted):
    whole = [token for token in range(VOCAB_SIZE) if chr_of(token) == "a"] * 5
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("a{0,9}"), STOPS, whole[:emitted], min_tokens=3))
    answer = [*whole[:emitted], *play(masks, [1], STOPS, prefer=ends_at_once)[1]]
    assert len(text(answer)) == max(3, emitted)


def test_a_stop_token_in_the_grammars_own_text_waits_for_the_least_length(compiler):
    [letter_a, letter_b] = [
        token for each in "ab" for token in range(VOCAB_SIZE) if chr_of(token) == each
    ]
    masks = GrammarMasks(compiler)
    masks.join(1, request(regex("[ab]{1,3}"), (*STOPS, letter_a), min_tokens=2))
    for step in range(3):
        found = masks.fill([1])
        assert (letter_a in allowed(found, 0)) == (step == 2)
        masks.advance([(1, letter_b)])
