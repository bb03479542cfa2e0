"""Stop strings: found whatever the pieces, and never shown in part."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.text.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.stopped:
            return shown, True
    return shown + matcher.finish(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first stop to be complete wins, the longer of two."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))], True
    return text, False


TEXT = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


@given(stops=STOPS, pieces=st.lists(TEXT, max_size=6))
def test_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@given(stops=STOPS, pieces=st.lists(TEXT, max_size=6))
def test_nothing_is_shown_that_may_belong_to_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        # However the text goes on, what is shown stays right.
        for rest in ("", *stops, *(stop[1:] for stop in stops)):
            assert expected(stops, seen + rest)[0].startswith(shown)
        if matcher.stopped:
            return


@given(stops=STOPS, pieces=st.lists(TEXT, max_size=6))
def test_no_more_is_held_back_than_must_be(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.stopped:
            return
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stops_text_passes_at_once() -> None:
    assert run([], ["a", "b"]) == ("ab", False)


def early(stops: list[str], text: str, least: int) -> tuple[str, bool]:
    """The same, where no stop counts that ends within the first ``least`` characters."""
    for end in range(least + 1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))], True
    return text, False


@given(stops=STOPS, text=TEXT, least=st.integers(0, 12))
def test_stops_that_end_too_early_are_text(stops: list[str], text: str, least: int) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for at, character in enumerate(text):
        shown += matcher.push(character, may_end=at >= least)
        if matcher.stopped:
            break
    else:
        shown += matcher.finish()
    assert (shown, matcher.stopped) == early(stops, text, least)
