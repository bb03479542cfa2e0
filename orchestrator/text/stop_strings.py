"""Finds stop strings in text that arrives in pieces, without ever showing a part of one."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, whatever the pieces it comes in.

    The first is the one that is complete first; of two that end together, the longer. Text that
    may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self._starts = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self.stopped = False

    @property
    def active(self) -> bool:
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Return the text that may be shown now; ``stopped`` tells whether a stop was met.

        Unless it ``may_end``, a stop string that this text completes is text as any other.
        """
        assert not self.stopped, "text after the stop"
        if not self._stops:
            return text
        held = len(self._held)
        text = self._held + text
        start = self._first_stop(text, held) if may_end else None
        if start is not None:
            self.stopped = True
            self._held = ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return what is held back: the text ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, held: int) -> int | None:
        """Where the stop that is complete first starts, or None.

        What ends within the first ``held`` characters was let pass already.
        """
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        return min(found)[1] if found else None

    def _possible_start(self, text: str) -> int:
        """The first position from which the rest of ``text`` may grow into a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._starts:
                rest = text[at:]
                if any(stop.startswith(rest) for stop in self._stops):
                    return at
        return len(text)
