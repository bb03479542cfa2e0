"""Tracks which text of a rendering the template itself wrote, and which it took from its input.

Strings are tracked by identity: constants of the compiled template and its other own strings are
known, and so are the parts of strings that the sandbox joined. Results of methods and filters are
unknown, as is input from clients. So text that counts as the template's own certainly is.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Final

import jinja2

Span = tuple[int, int]

_SHORTEST: Final = 2
"""Python has only one string object for each single character."""
_STEPS_PER_CHARACTER: Final = 4


def is_distinct(text: str) -> bool:
    """Whether a string with this text certainly is a different object than a client's.

    Python interns strings of one character, and names in code.
    """
    return len(text) >= _SHORTEST and not text.isidentifier()


def constants(template: jinja2.Template) -> Iterator[str]:
    """Yield the strings that are constants of a compiled template, which keeps them."""
    functions: list[Any] = [template.root_render_func, *template.blocks.values()]
    waiting: list[Any] = [function.__code__ for function in functions]
    while waiting:
        found = waiting.pop()
        if isinstance(found, CodeType):
            waiting += found.co_consts
        elif isinstance(found, tuple | frozenset):
            waiting += found
        elif type(found) is str and is_distinct(found):
            yield found


class Origins:
    """The origins of strings in one rendering.

    ``own``: identities of strings that outlive it. Joined strings are kept up to a total of
    ``most`` characters; later ones count as input.
    """

    __slots__ = ("_known", "_left", "_own", "_parts")

    def __init__(self, own: frozenset[int], most: int) -> None:
        self._own = own
        self._known = set(own)
        self._left = most
        # The strings are kept, so that their ids are not reused.
        self._parts: dict[int, tuple[str, Sequence[str]]] = {}

    def joined(self, made: str, parts: Sequence[str]) -> None:
        """Note a string that was joined from these parts."""
        if self._known.isdisjoint(map(id, parts)):
            return
        key = id(made)
        # A join of one part is that string itself.
        if key in self._known or len(made) > self._left:
            return
        self._left -= len(made)
        self._parts[key] = (made, parts)
        self._known.add(key)

    def wrote(self, text: str, spans: Iterable[Span]) -> bool:
        """Whether each of these ordered spans of the text is the template's own."""
        stretches = self._stretches(text)
        start = end = 0
        for first, last in spans:
            while end < last:
                stretch = next(stretches, None)
                if stretch is None:
                    return False
                start, end = stretch
            if first < start:
                return False
        return True

    def _stretches(self, text: str) -> Iterator[Span]:
        """Yield spans of the template's own text, found by a bounded search."""
        own, parts = self._own, self._parts
        start = end = at = 0
        waiting = [text]
        for _ in range(_STEPS_PER_CHARACTER * len(text)):
            if not waiting:
                break
            part = waiting.pop()
            key = id(part)
            if key in own:
                if end != at:
                    yield start, end
                    start = at
                at = end = at + len(part)
            elif key in parts:
                waiting += parts[key][1][::-1]
            else:
                at += len(part)
        if end > start:
            yield start, end
