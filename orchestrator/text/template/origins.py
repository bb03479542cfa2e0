"""Tells text that a template wrote itself from text that it took over, within one rendering.

Strings are told apart by identity: constants of the compiled template and what else it is given as
its own are known, and so are the parts of strings that the sandbox joined. What a method or filter
makes is not known, nor what a client sent. So what counts as the template's own always is.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Final

import jinja2

Span = tuple[int, int]

_SHORTEST: Final = 2
"""Python keeps one string object for each single character."""
_STEPS_PER_CHARACTER: Final = 4


def is_distinct(text: str) -> bool:
    """Whether a string with this text is surely another one than a client's.

    Python keeps one string for each name in code, besides those of one character.
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
    """Where the strings of one rendering come from.

    ``own`` are the identities of strings that live longer than it. Joined strings of ``most``
    characters in all are kept: beyond that, those that are made next count as taken over.
    """

    __slots__ = ("_known", "_left", "_own", "_parts")

    def __init__(self, own: frozenset[int], most: int) -> None:
        self._own = own
        self._known = set(own)
        self._left = most
        # A kept string's identity is not used again.
        self._parts: dict[int, tuple[str, Sequence[str]]] = {}

    def joined(self, made: str, parts: Sequence[str]) -> None:
        """Take note of a string that consists of these parts."""
        if self._known.isdisjoint(map(id, parts)):
            return
        key = id(made)
        # One part alone is the string itself.
        if key in self._known or len(made) > self._left:
            return
        self._left -= len(made)
        self._parts[key] = (made, parts)
        self._known.add(key)

    def wrote(self, text: str, spans: Iterable[Span]) -> bool:
        """Whether each of these spans of the text, in their order, is the template's own."""
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
        """Yield where the template's own text is, as far as a short search tells."""
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
