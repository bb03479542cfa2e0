"""One answer's text and counts do not depend on how its tokens arrive."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.service import NewTokens
from mlx_dp.orchestrator.text.choice_text import ChoiceText, Piece
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.stop_strings import StopStrings
from mlx_dp.proto.token_chunk import TokenLogprob

EOS = 256


def choice(*stops: str, stop_token: int = EOS) -> ChoiceText:
    detokenizer = FakeTextModel(512).detokenizer()
    return ChoiceText(detokenizer, StopStrings(stops), frozenset({stop_token}))


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
