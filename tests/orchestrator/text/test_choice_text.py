"""One answer's text and counts do not depend on how its tokens arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.api import NewTokens
from mlx_dp.orchestrator.text.choice_text import ChoiceText, Piece
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.stop_strings import StopStrings
from mlx_dp.proto.messages.events import TokenLogprob

EOS = 256


def choice(*stops: str, stop_token: int = EOS, skip: bool = True) -> ChoiceText:
    model = FakeTextModel(512)
    return ChoiceText(
        model.detokenizer(skip_special_tokens=skip),
        StopStrings(stops),
        frozenset({stop_token}),
        model.special_text,
        skip_special_tokens=skip,
    )


def tokens(data: bytes, *, logprobs: bool = False) -> NewTokens:
    found = tuple(TokenLogprob(logprob=-float(i)) for i in range(len(data))) if logprobs else ()
    return NewTokens(ids=tuple(data), logprobs=found)


def run(text: ChoiceText, events: list[NewTokens]) -> tuple[str, list[int], int, bool]:
    pieces: list[Piece] = []
    for event in events:
        pieces.append(text.push(event))
        if text.stopped:
            break
    pieces.append(text.finish())
    shown = [token.token for piece in pieces for token in piece.logprobs]
    return "".join(p.text for p in pieces), shown, text.completion_tokens, text.stopped


@given(
    data=st.text(alphabet="abé", max_size=12),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(min_value=1, max_value=4), max_size=24),
    logprobs=st.booleans(),
)
def test_pieces_do_not_matter(
    data: str, stops: list[str], sizes: list[int], logprobs: bool
) -> None:
    raw = data.encode()
    whole = run(choice(*stops), [tokens(bytes([b]), logprobs=logprobs) for b in raw])
    events, at = [], 0
    for size in [*sizes, len(raw)]:
        if at < len(raw):
            events.append(tokens(raw[at : at + size], logprobs=logprobs))
        at += size
    assert run(choice(*stops), events) == whole


def test_count_ends_with_the_token_that_completes_the_stop() -> None:
    assert run(choice("cd"), [tokens(b"abcdef")]) == ("ab", [], 4, True)


def test_stop_token_is_counted_and_not_shown() -> None:
    assert run(choice(), [NewTokens(ids=(97, EOS))]) == ("a", [], 2, False)
    # Also when it is an ordinary token that the client chose.
    assert run(choice(stop_token=98), [NewTokens(ids=(97, 98))]) == ("a", [], 2, False)
    # Its log-probability is: there is one entry for every token of the usage.
    event = NewTokens(ids=(97, EOS), logprobs=(TokenLogprob(logprob=-1.0),) * 2)
    assert run(choice(), [event]) == ("a", [97, EOS], 2, False)


def test_logprobs_do_not_give_away_a_stop_string() -> None:
    text = choice("cde")
    assert [t.token for t in text.push(tokens(b"abcd", logprobs=True)).logprobs] == [97, 98]
    piece = text.push(tokens(b"e", logprobs=True))
    assert (piece.text, piece.logprobs, text.stopped) == ("", (), True)
    text = choice("cde")
    text.push(tokens(b"abcd", logprobs=True))
    assert [t.token for t in text.push(tokens(b"x", logprobs=True)).logprobs] == [*b"cdx"]


def test_unfinished_bytes_may_complete_a_stop_string_at_the_end() -> None:
    assert run(choice("\ufffd"), [tokens(b"a\xf0\x9f")]) == ("a", [], 3, True)


SPECIAL = 300
NAME = "<|300|>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (NAME, "ab"),
        (f"b{NAME}", "a"),
        (f"b{NAME}c", "a"),
        (f"{NAME}c", "ab"),
        ("300", "ab"),
        (f"{NAME}x", None),
    ],
)
def test_stop_strings_match_special_tokens(stop: str, shown: str | None, skip: bool) -> None:
    found = run(choice(stop, skip=skip), [NewTokens(ids=(97, 98, SPECIAL, 99))])
    if shown is None:
        expected = "abc" if skip else f"ab{NAME}c"
        assert found == (expected, [], 4, False)
    else:
        text = shown + ("<|" if stop == "300" and not skip else "")
        count = 4 if stop.endswith("c") else 3
        assert found == (text, [], count, True)


def test_stop_strings_match_across_special_tokens_that_are_not_shown() -> None:
    events = [NewTokens(ids=(97, SPECIAL, 98, 99))]
    assert run(choice("ab"), events) == ("", [], 3, True)
    assert run(choice("ab", skip=False), events) == (f"a{NAME}bc", [], 4, False)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_that_ends_in_the_stop_token_is_not_shown(skip: bool) -> None:
    events = [NewTokens(ids=(97, 98)), NewTokens(ids=(EOS,))]
    assert run(choice("b<|end|>", skip=skip), events) == ("a", [], 3, True)


def test_special_tokens_are_shown_where_they_are_not_skipped() -> None:
    events = [NewTokens(ids=(97, SPECIAL, 98, EOS))]
    assert run(choice(skip=False), events) == (f"a{NAME}b", [], 4, False)
    assert run(choice(), events) == ("ab", [], 4, False)


@given(
    ids=st.lists(st.sampled_from([97, 98, 60, 124, SPECIAL, 301]), max_size=12),
    stops=st.lists(
        st.sampled_from(["ab", "a<", "<|", NAME, f"a{NAME}", f"{NAME}b", "0|>", "<|30"]), max_size=3
    ),
    logprobs=st.booleans(),
)
def test_no_stop_string_is_in_what_is_shown(
    ids: list[int], stops: list[str], logprobs: bool
) -> None:
    entries = tuple(TokenLogprob(logprob=0.0) for _ in ids) if logprobs else ()
    shown, _, count, stopped = run(choice(*stops), [NewTokens(ids=tuple(ids), logprobs=entries)])
    model = FakeTextModel(512)
    hidden, full = (
        [model.decode(ids[:end], skip_special_tokens=skip) for end in range(len(ids) + 1)]
        for skip in (True, False)
    )
    ends = [
        i
        for i, texts in enumerate(zip(hidden, full, strict=True))
        if any(stop in text for stop in stops for text in texts)
    ]
    assert stopped is bool(ends)
    assert count == (ends[0] if ends else len(ids))
    assert not any(stop in shown for stop in stops)
    assert hidden[-1].startswith(shown)
    if not ends:
        assert shown == hidden[-1]
