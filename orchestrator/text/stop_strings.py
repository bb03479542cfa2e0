"""Finds stop strings in text that arrives in pieces, and never lets a part of one through."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence


class StopStrings:
    """Lets text through up to the first stop string, however it is divided into pieces.

    The first is the one that is completed first; of two that end together, the longer one. Text
    that may begin a stop string is held back until that is decided. Names of special tokens are
    hidden text: a stop string may match with and without them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self._hidden = bytearray()
        """1 for each held-back character that is hidden."""
        self._starts = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self.stopped = False

    @property
    def active(self) -> bool:
        return bool(self._stops)

    def push(self, text: str, *, hidden: bool = False, may_end: bool = True) -> str:
        """Return the text that may be sent now. A match sets ``stopped``.

        Without ``may_end``, a stop string that this text completes is ordinary text.
        """
        assert not self.stopped, "text after the stop"
        if not self._stops:
            return "" if hidden else text
        passed = len(self._held)
        self._held += text
        self._hidden.extend(bytes([hidden]) * len(text))
        start = self._first_stop(passed) if may_end else None
        if start is not None:
            self.stopped = True
            shown = self._shown(start)
            self._drop(len(self._held))
            return shown
        keep = self._possible_start(self._held)
        shown_places = self._shown_places()
        if shown_places is not None:
            held = self._possible_start("".join([self._held[at] for at in shown_places]))
            keep = min([keep, *shown_places[held : held + 1]])
        shown = self._shown(keep)
        self._drop(keep)
        return shown

    def finish(self) -> str:
        """Return the text held back, which was no stop string since the text has ended."""
        held = self._shown(len(self._held))
        self._drop(len(self._held))
        return held

    def _shown(self, end: int) -> str:
        """The text before ``end``, without hidden characters."""
        if 1 not in self._hidden:
            return self._held[:end]
        return "".join([self._held[at] for at in range(end) if not self._hidden[at]])

    def _drop(self, end: int) -> None:
        self._held = self._held[end:]
        del self._hidden[:end]

    def _shown_places(self) -> list[int] | None:
        """Positions of the characters that are not hidden, or None for all."""
        if 1 not in self._hidden:
            return None
        return [at for at, hidden in enumerate(self._hidden) if not hidden]

    def _first_stop(self, passed: int) -> int | None:
        """Return the start of the stop string that is completed first, or None.

        Matches that end within the first ``passed`` characters were already ruled out.
        """
        found = list(self._matches(self._held, passed))
        places = self._shown_places()
        if places is not None:
            text = "".join([self._held[at] for at in places])
            matches = self._matches(text, bisect_left(places, passed))
            found += [(places[end - 1] + 1, places[at]) for end, at in matches]
        return min(found)[1] if found else None

    def _matches(self, text: str, passed: int) -> Iterator[tuple[int, int]]:
        for stop in self._stops:
            at = text.find(stop, max(0, passed - len(stop) + 1))
            if at >= 0:
                yield at + len(stop), at

    def _possible_start(self, text: str) -> int:
        """The first position at which ``text`` may end with the beginning of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._starts:
                rest = text[at:]
                if any(stop.startswith(rest) for stop in self._stops):
                    return at
        return len(text)
